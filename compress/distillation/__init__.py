"""Distillation: settings, teacher, divergences, the student's loss, recovery after pruning. Imports
teacher_cache.
"""
