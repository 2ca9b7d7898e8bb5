"""The command line: entry point, shared flags, this package's commands, recipes. Imports every other room; no
room imports it.
"""
