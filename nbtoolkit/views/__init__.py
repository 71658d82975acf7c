"""The current state of a folder of runs, as HTML and text, for cells, terminals and panels."""
