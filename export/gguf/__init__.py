"""Conversion of a checkpoint for llama.cpp, run as a script by that converter's interpreter."""
