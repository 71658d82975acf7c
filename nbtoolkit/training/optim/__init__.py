"""Optimizers, learning-rate schedules and averaged weights of the training loop."""
