"""The figures of docs/log.md: `make bench` runs them all; each module also runs alone, `python -m tests.bench.launches`."""
