"""Size, latency and memory of a model on a device, and `calibrate`. Imports devices and measure."""
