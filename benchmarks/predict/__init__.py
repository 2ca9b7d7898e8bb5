"""Predicting size, latency and memory from a device file, and calibrating one. Imports devices and measure."""
