"""Splits of a data set for cross-validation."""
