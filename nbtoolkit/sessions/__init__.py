"""Take runs, notebooks and the package itself from one session or host to the next."""
