"""Runs in Weights & Biases: ``tracking.wandb: true`` (docs/sweep/tracking.md)."""
