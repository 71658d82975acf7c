"""The figures of docs/log.md: `make bench` runs them all, `python -m tests.bench NAME` one."""
