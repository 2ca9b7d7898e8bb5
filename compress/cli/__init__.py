"""This package's commands and the flags they share. Imports every other room; no room imports it."""
