"""LightGBM, XGBoost and scikit-learn in a run, compared with the same work of each alone.

    python -m tests.bench.boosting FRAMEWORK [TIMES]

Both are trained in turn, in one rank, with one thread: several threads of OpenMP wait for each
other in a loop, and take up to seven times as long where another process uses a core. A ratio is
the median of all pairs'. With TIMES as many rounds, a cost that is fixed becomes a smaller part.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import nbtoolkit as nb
from nbtoolkit.integrations import boosting as nbb
from nbtoolkit.integrations import sklearn as nbs
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

PAIRS, ROUNDS, TARGET = 7, 200, 1.03
LONG = 4  # times the rounds of a short training
Pair = tuple[Callable[[], object], Callable[[], object]]


def samples() -> tuple[Any, Any]:
    """20,000 samples of 20 columns."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20_000, 20))
    return x, (x[:, :5].sum(axis=1) + generator.normal(size=len(x)) > 0).astype(int)


def lightgbm_pair(ctx: nb.RunContext, number: int, times: int) -> Pair:
    import lightgbm as lgb

    x, y = samples()
    params = {"objective": "binary", "metric": "auc", "verbosity": -1, "num_threads": 1, "seed": 0}
    name, rounds = f"number{number}", ROUNDS * times

    def train(**arguments: Any) -> object:
        data = lgb.Dataset(x[:16_000], y[:16_000])
        held_out = lgb.Dataset(x[16_000:], y[16_000:], reference=data)
        return lgb.train(train_set=data, valid_sets=[held_out], **arguments)

    def in_a_run() -> object:
        return train(**nbb.lightgbm(ctx, params, rounds, name=name))

    return lambda: train(params=params, num_boost_round=rounds), in_a_run


def xgboost_pair(ctx: nb.RunContext, number: int, times: int) -> Pair:
    import xgboost as xgb

    x, y = samples()
    params = {"objective": "binary:logistic", "eval_metric": "auc", "nthread": 1, "seed": 0}
    name, rounds = f"number{number}", ROUNDS * times

    def train(**arguments: Any) -> object:
        evals = [(xgb.DMatrix(x[16_000:], y[16_000:]), "valid")]
        data = xgb.DMatrix(x[:16_000], y[:16_000])
        return xgb.train(dtrain=data, evals=evals, verbose_eval=False, **arguments)

    def in_a_run() -> object:
        return train(**nbb.xgboost(ctx, params, rounds, name=name))

    return lambda: train(params=params, num_boost_round=rounds), in_a_run


def sklearn_pair(ctx: nb.RunContext, number: int, times: int) -> Pair:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import accuracy_score
    from skops.io import dump

    x, y = samples()
    model = HistGradientBoostingClassifier(
        max_iter=100 * times, early_stopping=False, random_state=0
    )
    fitted, held_out = (x[:16_000], y[:16_000]), (x[16_000:], y[16_000:])

    def alone() -> object:
        model.fit(*fitted)
        dump(model, ctx.paths.folder / "alone.skops")  # as a run does: some percent of this work
        return model.predict(held_out[0]), accuracy_score(held_out[1], model.predict(held_out[0]))

    return alone, lambda: nbs.fit(ctx, model, *fitted, *held_out, metrics=["accuracy"])


PAIRS_OF = {"lightgbm": lightgbm_pair, "xgboost": xgboost_pair, "sklearn": sklearn_pair}


def ratios(framework: str, times: int = 1) -> dict[str, float]:
    """Time in a run over time alone, of the clock and of the CPU; and the extra CPU time in ms."""

    def compare(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        found: dict[str, list[float]] = {"seconds": [], "CPU seconds": [], "extra CPU ms": []}
        with threadpool_limits(1):
            for number in range(PAIRS + 1):
                pair = PAIRS_OF[framework](ctx, number, times)
                taken = {}
                for which in (0, 1) if number % 2 else (1, 0):
                    gc.collect()
                    start = time.perf_counter(), time.process_time()
                    pair[which]()
                    taken[which] = time.perf_counter() - start[0], time.process_time() - start[1]
                found["seconds"].append(taken[1][0] / taken[0][0])
                found["CPU seconds"].append(taken[1][1] / taken[0][1])
                found["extra CPU ms"].append(1000 * (taken[1][1] - taken[0][1]))
        return {name: median(values[1:]) for name, values in found.items()}  # the first imports

    with quiet_config() as config:
        return dict(nb.launch(compare, config, processes=1, resume="never", display="off").value)


def figures() -> list[Figure]:
    """The ratios of each framework that is installed; on a machine in use, the CPU's are exact."""
    found = []
    for framework in PAIRS_OF:
        if find_spec(framework) is None:
            continue
        for times, work in (1, "a short training"), (LONG, f"one of {LONG} x the rounds"):
            values = in_fresh_process("tests.bench.boosting", framework, str(times))
            extra = values.pop("extra CPU ms")
            for of, value in values.items():
                name = f"{framework}: {of} of {work} in a run / alone"
                found.append(Figure(name, value, "", TARGET, 1.2 if of == "CPU seconds" else None))
            found.append(Figure(f"{framework}: extra CPU time of {work} in a run", extra, "ms"))
    return found


if __name__ == "__main__":
    print(json.dumps(ratios(sys.argv[1], *map(int, sys.argv[2:]))))
