"""Relay: the runs of a session that ends, in one file, for the session that goes on with them."""
