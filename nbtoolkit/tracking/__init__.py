"""Read a run's events and write them to MLflow, TensorBoard and W&B, outside the training.

    events.jsonl -> Follower (follower.py) -> MLflowTracker, TensorBoardTracker, extras/wandb
                       |                       |
                 tracking.json            <output_dir>/mlflow.db, <run folder>/{tensorboard,wandb}

The trials and folds of a sweep are followed below it (follower.py); they are runs nested in its run
(mlflow_tracker.py). The service (service.py) follows the runs of a kernel in its own process.
Nothing here imports MLflow, W&B or torch before it is used.
"""

from importlib import import_module

_HOME = {"replay": "service", "tracking_table": "database"}


def __getattr__(name: str) -> object:
    """Import what users call: ``replay`` and ``tracking_table`` (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
