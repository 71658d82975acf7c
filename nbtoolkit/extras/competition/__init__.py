"""Blend cross-validated models, and check submissions: ``nb.blend``, ``nb.check_submission``."""
