"""A run, a sweep and its best settings record the function that ran."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import functions
import pytest

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError
from nbtoolkit.launcher.train_function import task_name
from nbtoolkit.tasks.find import find_task

SPACE = {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}}


def score(config: Any, ctx: Any) -> None:
    ctx.report({"score": config.optim.lr})


def recorded(result: Any) -> nb.Config:
    """The configuration that its folder has."""
    return nb.load_config(result.paths.config, env=None)


class Callable:
    def __call__(self, config: Any, ctx: Any) -> None: ...


def test_only_a_function_that_can_be_imported_has_a_name_in_a_file() -> None:
    assert task_name(functions.ranks) == "functions:ranks"
    assert find_task(task_name(functions.ranks)) is functions.ranks

    def inner(config: Any, ctx: Any) -> None: ...

    assert task_name(inner) == "__main__:inner"
    assert task_name(lambda config, ctx: None) == "__main__:lambda"
    assert task_name(functools.partial(score)) == "__main__:partial"
    assert task_name(Callable()) == "__main__:Callable"


def test_a_run_says_whose_function_it_was(config: nb.Config) -> None:
    result = nb.launch(functions.ranks, config, start="inline", display="off")
    assert recorded(result).task == "functions:ranks"


def test_the_best_of_a_sweep_names_its_function(config: nb.Config, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    result = nb.sweep(score, config, {"study": {"metric": "score"}, "space": SPACE}, n_trials=2)
    assert result.best_config.task == task_name(score)
    best = nb.load_config(result.save_best(tmp_path / "best.yaml"), env=None)
    assert find_task(best.task) is score


@pytest.mark.parametrize("kind", ["run", "cv"])
def test_a_function_that_no_file_can_name_is_told_as_that(config: nb.Config, kind: str) -> None:
    def mine(config: Any, ctx: Any) -> None:
        ctx.report({"score": 1.0})

    if kind == "run":
        found: Any = nb.launch(mine, config, start="inline", display="off")
    else:
        folds = nb.make_folds([0, 1] * 4, k=2)
        found = nb.cross_validate(mine, config, folds, display="off")
    assert recorded(found).task == "__main__:mine"
    what = (
        r"'__main__:mine': a function of a cell(.|\n)*no file can name(.|\n)*nb.launch\(mine, con"
    )
    with pytest.raises(ConfigError, match=what):
        find_task(recorded(found).task)
