"""Write and read the files of checkpoints: whole, in parts, and their weights alone."""
