"""Train LightGBM in a run, with reports, pruning, checkpoints, and parameters from the plan.

    booster = lgb.train(
        nblg.parameters(ctx, params), data, num_boost_round=500, valid_sets=[held_out],
        callbacks=[nblg.callback(ctx)], init_model=nblg.resume_from(ctx),
    )

A resumed run has as many trees in total as the call asks for. Its bagging and feature sampling draw
other numbers than in an uninterrupted run, and early stopping counts anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.integrations.rounds import Rounds, rounds_of
from nbtoolkit.training.evaluation import keep_predictor as keep_predictor

if TYPE_CHECKING:
    import lightgbm
    from lightgbm.callback import CallbackEnv

    from nbtoolkit.worker.context import RunContext

# LightGBM's names for one parameter, from "Parameters" in its documentation.
_DEVICE = ("device_type", "device")
_THREADS = ("num_threads", "num_thread", "nthread", "nthreads", "n_jobs")
_SEED = ("seed", "random_seed", "random_state")
_ROUNDS = (
    *("num_iterations", "num_iteration", "n_iter", "num_tree", "num_trees", "num_round"),
    *("num_rounds", "nrounds", "num_boost_round", "n_estimators", "max_iter"),
)


def parameters(
    ctx: RunContext, params: Mapping[str, Any] | None = None, *, name: str = "lightgbm"
) -> dict[str, Any]:
    """Complete LightGBM's parameters from the settings and the plan of this run.

    The settings under ``model.`` replace those in ``params``. Then the plan gives what is not set:
    ``num_threads``, ``seed``, and on a GPU ``device_type`` if this build of LightGBM can use it.
    In a resumed run ``num_iterations`` is the number of trees that are missing.

    Args:
        ctx: the run.
        params: LightGBM's own parameters.
        name: of this training; for several in one run.

    Raises:
        MissingExtra: LightGBM 4 or newer is not installed.
        PlanError: the run has several ranks.
    """
    rounds = _rounds(ctx, name)
    rounds.prepared = True
    values = {**(params or {}), **ctx.config.model}
    asked = [values.pop(key) for key in _ROUNDS if key in values]
    if asked:
        rounds.target = int(asked[0])
    booster = _saved(rounds)
    done = 0 if booster is None else booster.current_iteration()
    if rounds.target is not None:
        values["num_iterations"] = rounds.target - done
    if not values.keys() & {*_THREADS}:
        values["num_threads"] = ctx.plan.threads_per_rank
    if not values.keys() & {*_SEED}:
        values["seed"] = ctx.seed + done  # else the draws of the first trees again
    if ctx.plan.device_type == "cuda" and not values.keys() & {*_DEVICE}:
        values["device_type"] = _device(ctx)
    return values


def resume_from(ctx: RunContext, *, name: str = "lightgbm") -> lightgbm.Booster | None:
    """The booster that an interrupted run has saved, for ``init_model``; None in a new run.

    Raises:
        MissingExtra: LightGBM 4 or newer is not installed.
        PlanError: the run has several ranks.
    """
    rounds = _rounds(ctx, name)
    rounds.continued = True
    return _saved(rounds)


def callback(ctx: RunContext, *, every: int = 10, name: str = "lightgbm") -> LightGBMCallback:
    """A callback for ``lgb.train`` and for ``fit`` of LightGBM's estimators.

    It reports each metric of each evaluated set as ``<set>_<metric>``, with LightGBM's own names
    (``valid_0_auc``), and saves as ``checkpoint.every_minutes`` and ``checkpoint.every_steps`` say.

    Args:
        ctx: the run.
        every: report after this number of rounds, and after the last one.
        name: of this training; for several in one run. Their metrics begin with it.

    Raises:
        MissingExtra: LightGBM 4 or newer is not installed.
        PlanError: the run has several ranks.
    """
    prefix = "" if name == "lightgbm" else f"{name}_"
    return LightGBMCallback(_rounds(ctx, name), every, prefix)


class LightGBMCallback:
    """Reports, prunes, stops and saves; see :func:`callback`."""

    # After LightGBM's own records (20), before its early stopping (30) ends the loop.
    order = 25
    before_iteration = False

    def __init__(self, rounds: Rounds, every: int, prefix: str) -> None:
        self._rounds, self._every, self._prefix = rounds, every, prefix

    def __call__(self, env: CallbackEnv) -> None:
        """Called by LightGBM after each round."""
        done = env.iteration + 1
        if env.iteration == env.begin_iteration:
            self._begin(env)
        results = env.evaluation_result_list
        due = results and (done % self._every == 0 or done == env.end_iteration)
        metrics = {f"{self._prefix}{one[0]}_{one[1]}": one[2] for one in results} if due else None
        self._rounds.end_round(done, metrics, lambda: env.model.model_to_string(num_iteration=-1))

    def _begin(self, env: CallbackEnv) -> None:
        rounds = self._rounds
        rounds.begin(env.end_iteration, self._every)
        if not (rounds.prepared and rounds.continued):
            rounds.do_not_save("pass nblg.parameters(ctx) and init_model=nblg.resume_from(ctx)")


def _rounds(ctx: RunContext, name: str) -> Rounds:
    return rounds_of(ctx, f"{name}.txt", "LightGBM", "4")


def _saved(rounds: Rounds) -> lightgbm.Booster | None:
    """The saved booster, without the last tree if it is complete: LightGBM trains at least one."""
    if rounds.saved is None or rounds.target is None:
        return None
    from lightgbm import Booster

    booster = Booster(model_file=rounds.saved)
    if booster.current_iteration() < rounds.target:
        return booster
    return Booster(model_str=booster.model_to_string(num_iteration=rounds.target - 1))


def _device(ctx: RunContext) -> str:
    """The device that this build of LightGBM can use: it says so only by training."""
    import lightgbm
    import numpy as np

    rows = np.arange(40.0).reshape(20, 2)
    reasons = []
    for device in ("cuda", "gpu"):
        params = {"device_type": device, "verbosity": -1, "min_data_in_leaf": 1}
        try:
            lightgbm.train(params, lightgbm.Dataset(rows, rows[:, 0]), num_boost_round=1)
        except lightgbm.basic.LightGBMError as error:
            reasons.append(str(error).partition("\n")[0])
        else:
            return device
    ctx.message(f"LightGBM trains on the CPU: {'; '.join(reasons)}")
    return "cpu"
