"""The training loop of ``nb.fit``, with sampling, optimizer, precision, metrics, checkpoints."""
