"""Train XGBoost in a run, with reports, pruning, checkpoints, and parameters from the plan.

    booster = xgb.train(
        nbx.parameters(ctx, params), data, 500, evals=[(held_out, "valid")],
        callbacks=[nbx.callback(ctx, 500)], xgb_model=nbx.resume_from(ctx),
    )

The callback needs the number of rounds, because XGBoost does not tell its callbacks: a resumed run
has as many rounds in total. Its subsampling draws other numbers than in an uninterrupted run, and
early stopping counts anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.integrations.rounds import Rounds, rounds_of
from nbtoolkit.training.evaluation import keep_predictor as keep_predictor

if TYPE_CHECKING:
    import xgboost
    from xgboost.callback import TrainingCallback

    from nbtoolkit.worker.context import RunContext

_THREADS = ("nthread", "n_jobs")
_SEED = ("seed", "random_state")


def parameters(
    ctx: RunContext, params: Mapping[str, Any] | None = None, *, name: str = "xgboost"
) -> dict[str, Any]:
    """Complete XGBoost's parameters from the settings and the plan of this run.

    The settings under ``model.`` replace those in ``params``. Then the plan gives what is not set:
    ``device`` (``"cpu"`` or ``"cuda:0"``), ``nthread``, ``seed``.

    Args:
        ctx: the run.
        params: XGBoost's own parameters.
        name: of this training; for several in one run.

    Raises:
        MissingExtra: XGBoost 2 or newer is not installed.
        PlanError: the run has several ranks.
    """
    booster = _saved(_rounds(ctx, name))
    values = {**(params or {}), **ctx.config.model}
    if not values.keys() & {*_THREADS}:
        values["nthread"] = ctx.plan.threads_per_rank
    if not values.keys() & {*_SEED}:
        # Else the draws of the first rounds again.
        values["seed"] = ctx.seed + (0 if booster is None else booster.num_boosted_rounds())
    values.setdefault("device", _device(ctx))
    return values


def resume_from(ctx: RunContext, *, name: str = "xgboost") -> xgboost.Booster | None:
    """The booster that an interrupted run has saved, for ``xgb_model``; None in a new run.

    Raises:
        MissingExtra: XGBoost 2 or newer is not installed.
        PlanError: the run has several ranks.
    """
    rounds = _rounds(ctx, name)
    rounds.continued = True
    return _saved(rounds)


def callback(
    ctx: RunContext, num_boost_round: int, *, every: int = 10, name: str = "xgboost"
) -> TrainingCallback:
    """A callback for ``xgb.train`` and for XGBoost's estimators.

    It reports each metric of each evaluated set as ``<set>_<metric>``, with XGBoost's own names
    (``validation_0_logloss``), and saves as ``checkpoint.every_minutes`` and
    ``checkpoint.every_steps`` say.

    Args:
        ctx: the run.
        num_boost_round: that of the call (of an estimator: ``n_estimators``).
        every: report after this number of rounds, and after the last one.
        name: of this training; for several in one run. Their metrics begin with it.

    Raises:
        MissingExtra: XGBoost 2 or newer is not installed.
        PlanError: the run has several ranks.
    """
    rounds = _rounds(ctx, name)
    from xgboost.callback import TrainingCallback

    prefix = "" if name == "xgboost" else f"{name}_"

    class XGBoostCallback(TrainingCallback):
        """Reports, prunes, stops and saves."""

        def before_training(self, model: xgboost.Booster) -> xgboost.Booster:
            self.done = model.num_boosted_rounds()
            resumed = rounds.saved is not None and rounds.continued
            rounds.begin(num_boost_round if resumed else self.done + num_boost_round, every)
            if not rounds.continued:
                rounds.do_not_save("pass xgb_model=nbx.resume_from(ctx)")
            return model

        def before_iteration(self, model: xgboost.Booster, epoch: int, evals_log: Any) -> bool:
            return rounds.target is not None and self.done >= rounds.target  # true: end

        def after_iteration(self, model: xgboost.Booster, epoch: int, evals_log: Any) -> bool:
            self.done += 1
            due = evals_log and (self.done % every == 0 or self.done == rounds.target)
            metrics = _last(evals_log, prefix) if due else None
            rounds.end_round(self.done, metrics, lambda: bytes(model.save_raw("ubj")))
            return False

    return XGBoostCallback()


def _last(evals_log: Mapping[str, Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """The newest value of each metric."""
    return {
        f"{prefix}{of}_{metric}": values[-1]
        for of, metrics in evals_log.items()
        for metric, values in metrics.items()
    }


def _rounds(ctx: RunContext, name: str) -> Rounds:
    return rounds_of(ctx, f"{name}.ubj", "XGBoost", "2")


def _saved(rounds: Rounds) -> xgboost.Booster | None:
    if rounds.saved is None:
        return None
    from xgboost import Booster

    return Booster(model_file=rounds.saved)


def _device(ctx: RunContext) -> str:
    """The plan's device, if this build of XGBoost can use it."""
    if ctx.plan.device_type == "cpu":
        return "cpu"
    import xgboost

    if not xgboost.build_info()["USE_CUDA"]:
        ctx.message("XGBoost trains on the CPU: this build has no CUDA")
        return "cpu"
    return str(ctx.device)
