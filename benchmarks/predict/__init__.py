"""Latency and memory of a model on a device, what a training takes, and `calibrate`. Imports devices and measure."""
