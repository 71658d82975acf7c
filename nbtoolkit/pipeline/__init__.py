"""Run notebooks in order; each step can use the values that earlier steps published."""
