"""Distillation: settings, the teacher or its stored signals, a student's start and training. Imports pruning."""
