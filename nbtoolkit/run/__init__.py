"""A run's folder, events, messages, checkpoints and what it shows."""
