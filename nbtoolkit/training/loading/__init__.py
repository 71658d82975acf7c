"""Which samples a step takes, and the batches made from them."""
