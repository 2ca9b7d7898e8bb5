"""The report of finished stages: HTML, Markdown and CSV. Imports devices and compare's FLOP counts."""
