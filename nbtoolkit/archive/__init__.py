"""Pack the runs of a session into one file and unpack them in the next."""
