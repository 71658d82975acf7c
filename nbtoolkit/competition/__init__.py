"""Competitions: blends of cross-validated models, and checked submissions."""
