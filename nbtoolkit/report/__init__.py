"""The report on a folder of runs, sweeps and cross-validations, from their files alone."""
