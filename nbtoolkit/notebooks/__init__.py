"""Notebooks as programs: typed parameters in, published values out, an executed copy beside."""
