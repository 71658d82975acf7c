"""Training functions with LightGBM and XGBoost on the same data, which can kill themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.integrations import boosting as nbb
from nbtoolkit.worker.context import RunContext

Train = Callable[..., dict[str, Any]]

ROUNDS = 60
# One thread: OpenMP's threads wait in busy loops, which costs seconds on a machine in use.
LIGHTGBM = {"objective": "binary", "metric": "auc", "verbosity": -1, "num_threads": 1}
XGBOOST = {"objective": "binary:logistic", "eval_metric": "auc", "max_depth": 3, "nthread": 1}


def samples(size: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and the sign of the sum of three of them with noise."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(size, 10))
    return x, (x[:, :3].sum(axis=1) + generator.normal(size=size) > 0).astype(int)


def split(
    ctx: RunContext | None,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and held-out part: those of the fold, else the first 400 and the last 200."""
    x, y = samples()
    fold = None if ctx is None else ctx.fold
    train, valid = (
        (np.arange(400), np.arange(400, 600))
        if fold is None
        else (np.asarray(fold.train_indices), np.asarray(fold.valid_indices))
    )
    return (x[train], y[train]), (x[valid], y[valid])


def disturb(config: Config, ctx: RunContext, done: int) -> None:
    """Once per folder: die, or be so slow that the run is stopped; as ``data`` says."""
    folder = Path(config.data.get("folder", "."))
    if done == config.data.get("die_at") and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if config.data.get("slow") and not (folder / "resumed").exists():
        time.sleep(0.05)


def with_lightgbm(config: Config, ctx: RunContext) -> dict[str, Any]:
    import lightgbm as lgb

    train, valid = split(ctx)
    data = lgb.Dataset(*train)

    def after(env: Any) -> None:
        disturb(config, ctx, env.iteration + 1)

    booster = lgb.train(
        **nbb.lightgbm(ctx, LIGHTGBM, ROUNDS, callbacks=[after]),
        train_set=data,
        valid_sets=[lgb.Dataset(*valid, reference=data)],
        valid_names=["held_out"],
    )
    nbb.keep_predictor(ctx, booster.predict)
    return {"rounds": booster.current_iteration(), "predictions": booster.predict(valid[0])}


def with_xgboost(config: Config, ctx: RunContext) -> dict[str, Any]:
    import xgboost as xgb

    train, valid = split(ctx)
    held_out = xgb.DMatrix(*valid)

    class Disturb(xgb.callback.TrainingCallback):  # type: ignore[misc]
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            disturb(config, ctx, model.num_boosted_rounds())
            return False

    booster = xgb.train(
        **nbb.xgboost(ctx, XGBOOST, ROUNDS, callbacks=[Disturb()]),
        dtrain=xgb.DMatrix(*train),
        evals=[(held_out, "held_out")],
        verbose_eval=False,
    )
    nbb.keep_predictor(ctx, lambda test: booster.predict(xgb.DMatrix(test)))
    return {"rounds": booster.num_boosted_rounds(), "predictions": booster.predict(held_out)}


def reports(folder: Path) -> list[int]:
    """The rounds of a run's reports."""
    events = nb.attach(folder).events()
    return [event.step for event in events if event.type == "report" and event.step is not None]


def check_folds(train: Train, folder: Path, metric: str) -> None:
    """Cross-validate a function on three folds, each with a score of its own."""
    folds = nb.make_folds(samples()[1], k=3)
    cv = nb.cross_validate(train, _quiet(folder), folds, display="off")
    assert cv.status == "completed"
    assert len({*cv.scores[metric]}) == 3


def check_pruned_sweep(train: Train, folder: Path, metric: str) -> None:
    """Search for the rate of a function: the one that learns nothing is pruned."""
    search = {
        "study": {
            "metric": metric,
            "sampler": "random",
            "pruner": "median",
            "pruner_options": {"n_startup_trials": 1},
        },
        "space": {"model.learning_rate": {"type": "float", "low": 1e-8, "high": 0.3}},
        "first_trials": [{"model.learning_rate": rate} for rate in (0.3, 0.3, 1e-8)],
    }
    result = nb.sweep(train, _quiet(folder), search, n_trials=3, display="off")
    # Two slots: the third trial starts when one of the others is done.
    assert list(result.trials["state"]) == ["complete", "complete", "pruned"]
    assert result.best_params["model.learning_rate"] == 0.3


def _quiet(folder: Path) -> nb.Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder)}
    return nb.load_config(env=None, overrides=settings)
