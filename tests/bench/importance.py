"""Importance of parameters: whether the right ones come first and last, 20 trials, 10 seeds.

A small network on Friedman's regression, 12 epochs, four parameters. The
weight decay does nothing within its limits. The truth is the same rule on 150 random trials, none
pruned. Two tasks: in ``wide`` the learning rate has three decades and explains nearly all, so that
the other three are nearly tied; in ``narrow`` three parameters matter. The narrow limits were
chosen by the truth alone: each of the three explains more than a tenth, and so leads.
Beside it: Optuna's default evaluator (PED-ANOVA) and its fANOVA as it is.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process

USELESS, TRIALS, SEEDS, TRUTH = "optim.weight_decay", 20, 10, 150
LEADS = 0.1
"""A parameter that explains more than this share leads."""
LOWEST_RATE = {"wide": 1e-4, "narrow": 3e-3}


def space(task: str) -> dict[str, Any]:
    return {
        "optim.lr": {"type": "float", "low": LOWEST_RATE[task], "high": 0.1, "log": True},
        "model.dropout": {"type": "float", "low": 0.0, "high": 0.5},
        "model.hidden": {"type": "int", "low": 8, "high": 128, "log": True},
        USELESS: {"type": "float", "low": 1e-6, "high": 1e-2, "log": True},
    }


@cache
def data() -> Any:
    import torch
    from sklearn.datasets import make_friedman1

    torch.set_num_threads(1)
    inputs, targets = make_friedman1(400, random_state=0)
    targets = (targets - targets.mean()) / targets.std()
    return torch.tensor(inputs).float(), torch.tensor(targets).float()


def train(params: Mapping[str, Any]) -> float:
    """Root of the mean squared error on 100 samples, after 12 epochs on 300."""
    import torch
    from torch.nn import Dropout, Linear, ReLU, Sequential

    inputs, targets = data()
    torch.manual_seed(0)
    hidden = params["model.hidden"]
    model = Sequential(
        Linear(10, hidden), ReLU(), Dropout(params["model.dropout"]), Linear(hidden, 1)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=params["optim.lr"], weight_decay=params[USELESS]
    )
    for _ in range(12):
        for batch in torch.randperm(300).split(32):
            optimizer.zero_grad()
            ((model(inputs[batch])[:, 0] - targets[batch]) ** 2).mean().backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float(((model(inputs[300:])[:, 0] - targets[300:]) ** 2).mean().sqrt())


def study(task: str, sampler: str, seed: int, trials: int) -> Any:
    """A study by the toolkit's own sampler, with its defaults."""
    import optuna

    from nbtoolkit.search.study.samplers import TrialSamplers
    from nbtoolkit.search.study.sweep_config import load_sweep_config

    about = {"metric": "rmse", "direction": "minimize", "sampler": sampler, "seed": seed}
    sweep_config = load_sweep_config(
        {"study": about, "space": space(task)}, nb.load_config(env=None), n_trials=trials
    )
    searched = sweep_config.make_space()
    samplers = TrialSamplers(sweep_config, searched)
    made = optuna.create_study()
    for number in range(trials):
        made.sampler = samplers.of(number)
        trial = made.ask(dict(searched.distributions))
        made.tell(trial, train(trial.params))
    return made


def measure(task: str) -> dict[str, Any]:
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    from nbtoolkit.search.study.importance import importance

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    truth = importance(study(task, "random", 1000, TRUTH).trials, most=TRUTH)
    leaders = [one.name for one in truth.shares if one.value > LEADS]
    found: dict[str, Any] = {
        "truth": {one.name: one.value for one in truth.shares},
        "leaders": len(leaders),
    }
    for sampler in ("random", "tpe"):
        counts: Counter[str] = Counter()
        for seed in range(SEEDS):
            made = study(task, sampler, seed, TRIALS)
            ours = importance(made.trials)
            forest = FanovaImportanceEvaluator(seed=0)
            orders = {
                "": [one.name for one in ours.shares],
                "default ": [*get_param_importances(made)],
                "fANOVA ": [*get_param_importances(made, evaluator=forest)],
            }
            for whose, names in orders.items():
                counts[f"{whose}first"] += names[0] == USELESS
                counts[f"{whose}not last"] += names[-1] != USELESS
                counts[f"{whose}leader"] += names[0] in leaders
        found[sampler] = dict(counts)
    return found


def figures() -> list[Figure]:
    rows: list[Figure] = []
    for task in LOWEST_RATE:
        measured = in_fresh_process("tests.bench.importance", task)
        for name, share in measured["truth"].items():
            rows.append(Figure(f"{task}: truth, share of {name}", share, ""))
        rows.append(Figure(f"{task}: leaders of the truth", measured["leaders"], ""))
        for sampler in ("random", "tpe"):
            n, of = measured[sampler], f"{task}, {sampler}, of {SEEDS} seeds:"
            rows += [
                Figure(f"{of} the useless one first", n["first"], "", 0, 0),
                Figure(f"{of} the useless one not last", n["not last"], "", 1),
                Figure(f"{of} the first is a true leader", n["leader"], ""),
            ]
            for whose in ("default ", "fANOVA "):
                values = [n[f"{whose}{what}"] for what in ("first", "not last", "leader")]
                told = ("the useless one first", "not last", "true leader")
                for what, value in zip(told, values, strict=True):
                    rows.append(Figure(f"{of} Optuna's {whose}: {what}", value, ""))
    return rows


if __name__ == "__main__":
    import sys

    print(json.dumps(measure(sys.argv[1])))
