"""Bundles and kernel metadata for Kaggle."""
