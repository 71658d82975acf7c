"""LightGBM, XGBoost and scikit-learn in a run, compared with the same work of each alone.

    python -m tests.bench.boosting [FRAMEWORK]

Both are trained in turn, in one rank, with one thread. A ratio is the median of all pairs'.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import nbtoolkit as nb
from nbtoolkit.integrations import lightgbm as nblg
from nbtoolkit.integrations import sklearn as nbs
from nbtoolkit.integrations import xgboost as nbx
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

PAIRS, ROUNDS, TARGET = 7, 200, 1.03
Pair = tuple[Callable[[], object], Callable[[], object]]


def samples() -> tuple[Any, Any]:
    """20,000 samples of 20 columns."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20_000, 20))
    return x, (x[:, :5].sum(axis=1) + generator.normal(size=len(x)) > 0).astype(int)


def lightgbm_pair(ctx: nb.RunContext, number: int) -> Pair:
    import lightgbm as lgb

    x, y = samples()
    params = {"objective": "binary", "metric": "auc", "verbosity": -1, "num_threads": 1, "seed": 0}
    name = f"number{number}"

    def train(params: Any, **more: Any) -> object:
        data = lgb.Dataset(x[:16_000], y[:16_000])
        held_out = lgb.Dataset(x[16_000:], y[16_000:], reference=data)
        return lgb.train(params, data, ROUNDS, valid_sets=[held_out], **more)

    def in_a_run() -> object:
        return train(
            nblg.parameters(ctx, params, name=name),
            callbacks=[nblg.callback(ctx, name=name)],
            init_model=nblg.resume_from(ctx, name=name),
        )

    return lambda: train(params), in_a_run


def xgboost_pair(ctx: nb.RunContext, number: int) -> Pair:
    import xgboost as xgb

    x, y = samples()
    params = {"objective": "binary:logistic", "eval_metric": "auc", "nthread": 1, "seed": 0}
    name = f"number{number}"

    def train(params: Any, **more: Any) -> object:
        evals = [(xgb.DMatrix(x[16_000:], y[16_000:]), "valid")]
        data = xgb.DMatrix(x[:16_000], y[:16_000])
        return xgb.train(params, data, ROUNDS, evals=evals, verbose_eval=False, **more)

    def in_a_run() -> object:
        return train(
            nbx.parameters(ctx, params, name=name),
            callbacks=[nbx.callback(ctx, ROUNDS, name=name)],
            xgb_model=nbx.resume_from(ctx, name=name),
        )

    return lambda: train(params), in_a_run


def sklearn_pair(ctx: nb.RunContext, number: int) -> Pair:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import accuracy_score
    from skops.io import dump

    x, y = samples()
    model = HistGradientBoostingClassifier(max_iter=100, random_state=0)
    fitted, held_out = (x[:16_000], y[:16_000]), (x[16_000:], y[16_000:])

    def alone() -> object:
        model.fit(*fitted)
        dump(model, ctx.paths.folder / "alone.skops")  # as a run does: some percent of this work
        return model.predict(held_out[0]), accuracy_score(held_out[1], model.predict(held_out[0]))

    return alone, lambda: nbs.fit(ctx, model, *fitted, *held_out, metrics=["accuracy"])


PAIRS_OF = {"lightgbm": lightgbm_pair, "xgboost": xgboost_pair, "sklearn": sklearn_pair}


def ratios(framework: str) -> dict[str, float]:
    """Time in a run over time alone: of the clock, and of the CPU."""

    def compare(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        found: dict[str, list[float]] = {"seconds": [], "CPU seconds": []}
        for number in range(PAIRS + 1):
            pair = PAIRS_OF[framework](ctx, number)
            taken = {}
            for which in (0, 1) if number % 2 else (1, 0):
                start = time.perf_counter(), time.process_time()
                pair[which]()
                taken[which] = time.perf_counter() - start[0], time.process_time() - start[1]
            for at, name in enumerate(found):
                found[name].append(taken[1][at] / taken[0][at])
        return {name: median(values[1:]) for name, values in found.items()}  # the first imports

    with quiet_config() as config:
        return dict(nb.launch(compare, config, processes=1, resume="never", display="off").value)


def figures() -> list[Figure]:
    """The ratios of each framework that is installed; on a machine in use, the CPU's are exact."""
    found = []
    for framework in PAIRS_OF:
        if find_spec(framework) is not None:
            values = in_fresh_process("tests.bench.boosting", framework)
            for of, value in values.items():
                name = f"{framework}: {of} of a training in a run / alone"
                found.append(Figure(name, value, "", TARGET, 1.2 if of == "CPU seconds" else None))
    return found


if __name__ == "__main__":
    print(json.dumps(ratios(sys.argv[1])))
