"""Carry messages, functions, arrays, values and errors across the border of a process."""
