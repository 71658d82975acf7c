"""Run the training function on several machines."""
