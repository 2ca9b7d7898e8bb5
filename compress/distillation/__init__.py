"""Distillation: settings, the teacher, the loss, the student's start and training, recovery."""
