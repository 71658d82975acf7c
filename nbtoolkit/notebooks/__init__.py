"""Run notebooks as programs: typed parameters in, published values and an executed copy out."""
