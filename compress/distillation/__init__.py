"""Distillation: settings, the running teacher, the student's training, recovery. Imports teacher_cache."""
