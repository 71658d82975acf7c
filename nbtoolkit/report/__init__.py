"""Reports: what lies in the folders of runs, as cells and as a page."""
