"""Kept answers: found again for the same function, model, data and devices only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.extras.tuning.answer import keep_answer
from nbtoolkit.run.kept_answers import answer_key, kept_answer
from nbtoolkit.tasks import digits


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    return nb.load_config(env=None, overrides={"runtime.output_dir": str(tmp_path / "outputs")})


def test_an_answer_is_found_again_with_its_time(config: nb.Config) -> None:
    key = answer_key(digits.train, config)
    assert kept_answer(config, "rate", key) is None
    keep_answer(config, "rate", key, {"rate": 0.01})
    keep_answer(config, "rate", key, {"rate": 0.02})
    keep_answer(config, "batch", key, {"micro": 32})
    kept = kept_answer(config, "rate", key)
    assert kept is not None
    assert kept["rate"] == 0.02
    assert time.time() - 60 < kept["measured"] <= time.time()


@pytest.mark.parametrize(
    "settings",
    [{"model.hidden": 64}, {"data.valid_share": 0.5}, {"train.batch_size": 16}],
    ids=["model", "data", "batch"],
)
def test_what_changes_a_step_changes_the_key(
    config: nb.Config, settings: dict[str, object]
) -> None:
    key = answer_key(digits.train, config)
    assert answer_key(digits.train, config.with_overrides(settings)) != key


def test_the_key_follows_function_and_captured_values_but_not_length(config: nb.Config) -> None:
    def make(width: int) -> Callable[..., int]:
        def train(config: nb.Config, ctx: nb.RunContext) -> int:
            return width

        return train

    key = answer_key(digits.train, config)
    assert answer_key(make(1), config) != key
    assert answer_key(make(1), config) != answer_key(make(2), config)
    assert answer_key(digits.train, config.with_overrides({"train.epochs": 99})) == key


def test_a_damaged_file_holds_no_answers(config: nb.Config) -> None:
    key = answer_key(digits.train, config)
    keep_answer(config, "rate", key, {"rate": 0.01})
    (Path(config.runtime.output_dir) / "tuning.json").write_text("{")
    assert kept_answer(config, "rate", key) is None
