"""Cross-validation: the training function on every fold."""
