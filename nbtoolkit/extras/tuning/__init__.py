"""Measure before a long run: what fits, which rate, which devices, and what it will cost."""
