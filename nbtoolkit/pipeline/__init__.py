"""Notebooks one after the other, each given what the ones before it published."""
