"""The control panel: widgets over public functions, and views of the folders of runs."""
