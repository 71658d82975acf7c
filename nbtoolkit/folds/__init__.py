"""Splits of a data set for cross-validation, and what leaks between them."""
