"""Strategies of ``nb.fit`` besides one process, DDP and DataParallel; found by their names."""
