"""Train LightGBM and XGBoost in a run, with reports, pruning, checkpoints, and the plan's settings.

    booster = lgb.train(
        **nbb.lightgbm(ctx, params, 500), train_set=data, valid_sets=[held_out]
    )
    booster = xgb.train(
        **nbb.xgboost(ctx, params, 500), dtrain=data, evals=[(held_out, "valid")]
    )

A resumed run has as many trees in total as the call asks for. Its sampling draws other numbers than
in an uninterrupted run, and early stopping counts anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbtoolkit.extras.integrations.rounds import Rounds
from nbtoolkit.extras.integrations.support import refuse_ranks, requires
from nbtoolkit.training.evaluation import keep_predictor as keep_predictor

if TYPE_CHECKING:
    from lightgbm.callback import CallbackEnv

    from nbtoolkit.worker.context import RunContext

# The libraries' names for one parameter, from "Parameters" in LightGBM's documentation and from
# XGBoost's estimators.
_THREADS = ("num_threads", "num_thread", "nthread", "nthreads", "n_jobs")
_SEEDS = ("seed", "random_seed", "random_state")
_ROUNDS = (
    *("num_iterations", "num_iteration", "n_iter", "num_tree", "num_trees", "num_round"),
    *("num_rounds", "nrounds", "num_boost_round", "n_estimators", "max_iter"),
)


def lightgbm(
    ctx: RunContext,
    params: Mapping[str, Any],
    rounds: int = 100,
    *,
    callbacks: Sequence[Any] = (),
    every: int = 10,
    name: str = "lightgbm",
) -> dict[str, Any]:
    """Return arguments for ``lgb.train``: of the settings, the plan and the last checkpoint.

    The settings under ``model.`` replace those in ``params``. The plan gives ``num_threads`` and
    ``seed`` if they are not set. The callback reports each metric of each evaluated set as
    ``<set>_<metric>``, with LightGBM's own names (``valid_0_auc``), and saves as
    ``checkpoint.every_minutes`` and ``checkpoint.every_steps`` say.

    Args:
        ctx: the run.
        params: LightGBM's own parameters. A number of rounds in them counts.
        rounds: the number of rounds in the finished model.
        callbacks: your own callbacks.
        every: report after this number of rounds, and after the last one.
        name: of this training; for several in one run. Their metrics begin with it.

    Returns:
        ``params, num_boost_round, callbacks, init_model``.

    Raises:
        FitError: another training of this run has the same name, or ``every`` is below 1.
        MissingExtra: LightGBM 4 or newer is not installed.
        PlanError: the run has several ranks.
    """
    with requires("lightgbm", "4"):
        from lightgbm import Booster
    refuse_ranks(ctx, "LightGBM")
    values, target = _parameters(ctx, params, rounds)
    training = Rounds(ctx, f"{name}.txt", target, every=every)
    booster = None
    done = 0
    if training.saved is not None:
        booster = Booster(model_file=training.saved)
        done = booster.current_iteration()
    if booster is not None and done >= target:  # LightGBM trains at least one tree
        done = target - 1
        booster = Booster(model_str=booster.model_to_string(num_iteration=done))
    _set_unless(values, _THREADS, num_threads=ctx.plan.threads_per_rank)
    _set_unless(values, _SEEDS, seed=ctx.seed + done)  # else the draws of the first trees again
    prefix = "" if name == "lightgbm" else f"{name}_"
    return {
        "params": values,
        "num_boost_round": target - done,
        "callbacks": [*callbacks, LightGBMCallback(training, prefix)],
        "init_model": booster,
    }


class LightGBMCallback:
    """Reports, prunes, stops and saves; see :func:`lightgbm`."""

    before_iteration = False

    order = 25
    """After LightGBM's own records (20), before its early stopping (30) ends the loop."""

    def __init__(self, training: Rounds, prefix: str) -> None:
        self._training = training
        self._prefix = prefix

    def __call__(self, env: CallbackEnv) -> None:
        """Run by LightGBM after each round."""
        results = env.evaluation_result_list
        self._training.end_round(
            env.iteration + 1,
            {f"{self._prefix}{result[0]}_{result[1]}": result[2] for result in results},
            lambda: env.model.model_to_string(num_iteration=-1),
        )


def xgboost(
    ctx: RunContext,
    params: Mapping[str, Any],
    rounds: int = 100,
    *,
    callbacks: Sequence[Any] = (),
    every: int = 10,
    name: str = "xgboost",
) -> dict[str, Any]:
    """Return arguments for ``xgb.train``: of the settings, the plan and the last checkpoint.

    The settings under ``model.`` replace those in ``params``. The plan gives ``device``
    (``"cpu"`` or ``"cuda:0"``), ``nthread`` and ``seed`` if they are not set. The callback reports
    each metric of each evaluated set as ``<set>_<metric>``, with XGBoost's own names
    (``validation_0_logloss``), and saves as ``checkpoint.every_minutes`` and
    ``checkpoint.every_steps`` say.

    Args:
        ctx: the run.
        params: XGBoost's own parameters. A number of rounds in them counts.
        rounds: the number of rounds in the finished model.
        callbacks: your own callbacks.
        every: report after this number of rounds, and after the last one.
        name: of this training; for several in one run. Their metrics begin with it.

    Returns:
        ``params, num_boost_round, callbacks, xgb_model``.

    Raises:
        FitError: another training of this run has the same name, or ``every`` is below 1.
        MissingExtra: XGBoost 2 or newer is not installed.
        PlanError: the run has several ranks.
    """
    with requires("xgboost", "2"):
        from xgboost import Booster
        from xgboost.callback import TrainingCallback
    refuse_ranks(ctx, "XGBoost")
    values, target = _parameters(ctx, params, rounds)
    training = Rounds(ctx, f"{name}.ubj", target, every=every)
    booster = None
    done = 0
    if training.saved is not None:
        booster = Booster(model_file=training.saved)
        done = booster.num_boosted_rounds()
    _set_unless(values, _THREADS, nthread=ctx.plan.threads_per_rank)
    _set_unless(values, _SEEDS, seed=ctx.seed + done)  # else the draws of the first rounds again
    values.setdefault("device", _device(ctx))
    prefix = "" if name == "xgboost" else f"{name}_"

    class XGBoostCallback(TrainingCallback):
        """Reports, prunes, stops and saves."""

        def after_iteration(self, model: Booster, epoch: int, evals_log: Any) -> bool:
            metrics = {
                f"{prefix}{of}_{metric}": values[-1]
                for of, metrics in evals_log.items()
                for metric, values in metrics.items()
            }
            done = model.num_boosted_rounds()
            training.end_round(done, metrics, lambda: bytes(model.save_raw("ubj")))
            return False

    return {
        "params": values,
        "num_boost_round": max(0, target - done),
        "callbacks": [*callbacks, XGBoostCallback()],
        "xgb_model": booster,
    }


def _parameters(
    ctx: RunContext, params: Mapping[str, Any], rounds: int
) -> tuple[dict[str, Any], int]:
    """Return the parameters without a number of rounds, and this number."""
    values = {**params, **ctx.config.model}
    asked = [values.pop(key) for key in _ROUNDS if key in values]
    return values, int(asked[0]) if asked else rounds


def _set_unless(values: dict[str, Any], names: Sequence[str], **parameter: int) -> None:
    """Set a parameter, unless one of its names is there."""
    if values.keys().isdisjoint(names):
        values.update(parameter)


def _device(ctx: RunContext) -> str:
    """Return the plan's device, if this build of XGBoost can use it."""
    if ctx.plan.device_type == "cpu":
        return "cpu"
    import xgboost

    if not xgboost.build_info()["USE_CUDA"]:
        ctx.message("XGBoost trains on the CPU: this build has no CUDA")
        return "cpu"
    return str(ctx.device)
