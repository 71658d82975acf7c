"""Find hazards in a notebook without running it (``nbtoolkit lint``)."""
