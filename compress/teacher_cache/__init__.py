"""Teacher distributions stored on disk and read back as a loss. Imports distillation's divergences and
teacher.
"""
