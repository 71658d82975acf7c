"""The optional training loop: order, optimizer, schedule, precision, metrics, checkpoints."""
