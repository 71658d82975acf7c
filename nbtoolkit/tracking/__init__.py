"""Trackers read a run's events and write them to MLflow and TensorBoard, outside the training.

    events.jsonl -> Follower (follow.py) -> Tracker: MLflowTracker, TensorBoardTracker, NullTracker
                       |                       |
                 tracking.json            <output_dir>/mlflow.db, <run folder>/tensorboard

The trials and folds of a sweep are followed below it (jobs.py) and are runs nested in its run
(nested.py).

The service (service.py) follows the runs of a kernel in a process of its own. Nothing here imports
MLflow or torch before it is used.
"""

from nbtoolkit.tracking.choice import TrackingChoice as TrackingChoice
from nbtoolkit.tracking.choice import choose_tracking as choose_tracking
from nbtoolkit.tracking.follow import Follower as Follower
from nbtoolkit.tracking.follow import follow as follow
from nbtoolkit.tracking.service import TrackingProcess as TrackingProcess
from nbtoolkit.tracking.service import replay as replay
from nbtoolkit.tracking.service import run_service as run_service
from nbtoolkit.tracking.table import tracking_table as tracking_table
from nbtoolkit.tracking.tracker import NullTracker as NullTracker
from nbtoolkit.tracking.tracker import Point as Point
from nbtoolkit.tracking.tracker import Tracker as Tracker

__all__ = [
    "Follower",
    "NullTracker",
    "Point",
    "Tracker",
    "TrackingChoice",
    "TrackingProcess",
    "choose_tracking",
    "follow",
    "replay",
    "run_service",
    "tracking_table",
]
