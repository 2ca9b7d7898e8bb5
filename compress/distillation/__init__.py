"""Distillation: settings, the running teacher, divergences, the student's training, recovery. Imports teacher_cache."""
