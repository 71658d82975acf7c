"""``nbtoolkit lint``: what will go wrong in a notebook, found without running it."""
