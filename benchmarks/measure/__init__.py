"""Measuring an export on this machine, each configuration in a fresh process. Imports devices."""
