"""Read a run's events and write them to MLflow and TensorBoard, outside the training.

    events.jsonl -> Follower (follower.py) -> MLflowTracker, TensorBoardTracker, NullTracker
                       |                       |
                 tracking.json            <output_dir>/mlflow.db, <run folder>/tensorboard

The trials and folds of a sweep are followed below it (follower.py); they are runs nested in its run
(mlflow_values.py). The service (service.py) follows the runs of a kernel in a process of its own.
Nothing here imports MLflow or torch before it is used.
"""
