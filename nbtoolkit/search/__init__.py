"""Search: sweeps and cross-validation over the training function that is there already."""
