"""Train with other frameworks in a run: one module each, an extra each."""
