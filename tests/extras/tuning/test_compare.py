"""nb.compare: the choice, what is kept, failures as rows, and what is refused at once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fits import model_of, samples
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError, TuningError
from nbtoolkit.extras.tuning.compare import SpeedRow, measure_in_turn


class Slow:
    """A data set that waits for each sample, as for a disk."""

    def __init__(self) -> None:
        self.inputs, self.labels = samples(160)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return self.inputs[index], self.labels[index]


def configuration(folder: Path, **more: Any) -> nb.Config:
    settings = {
        "train.epochs": 1,
        "train.batch_size": 16,
        "tracking.mlflow": False,
        "runtime.output_dir": str(folder / "outputs"),
        "data.marks": str(folder / "marks"),
    }
    return nb.load_config(env=None, overrides={**settings, **more})


def calls(config: nb.Config) -> int:
    return len(Path(config.data.marks).read_text())


def fits(config: Any, ctx: Any, data: object) -> Any:
    with Path(config.data.marks).open("a") as marks:
        marks.write(".")
    return nb.fit(ctx, config, model_of(), data, None, loss=cross_entropy)


def loads_slowly(config: Any, ctx: Any) -> Any:
    return fits(config, ctx, Slow())


@pytest.mark.long
def test_a_data_set_that_waits_gets_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path)
    choices = [{"train.num_workers": count} for count in (0, 1, 2)]
    table = nb.compare(loads_slowly, config, choices, processes=1)
    assert [row.settings for row in table.rows] == choices
    rates = [row.samples_per_second for row in table.rows]
    first = next(at for at, rate in enumerate(rates) if rate * 1.03 >= max(rates))
    assert table.settings == choices[first]
    assert first > 0
    assert rates[-1] > rates[0]
    measured = calls(config)
    assert measured >= len(choices)
    assert f"* train.num_workers: {first}" in capsys.readouterr().out
    assert nb.compare(loads_slowly, config, choices, processes=1).kept
    assert calls(config) == measured
    assert not nb.compare(loads_slowly, config, choices[:1], processes=1).kept


@pytest.mark.long
def test_a_choice_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        if config.train.compile:
            raise RuntimeError("no compiler here")
        # As if this layout were faster.
        return fits(config, ctx, samples(160) if config.train.channels_last else Slow())

    config = configuration(tmp_path)
    choices = [{}, {"train.channels_last": True}, {"train.compile": True}, {"optim.lr": 1e30}]
    table = nb.compare(train, config, choices, processes=1)
    base, layout, compiled, diverges = table.rows
    assert table.settings == {"train.channels_last": True}
    assert compiled.reason == "RuntimeError: no compiler here"
    assert diverges.reason.startswith("not finite: ")
    assert (compiled.loss, table.relative(compiled)) == (None, None)
    assert layout.loss == pytest.approx(base.loss, abs=1e-5)
    assert base.memory > 0.05
    assert "no compiler here" in repr(table)


@pytest.mark.long
def test_without_a_row_that_could_be_measured_the_first_error_is_raised(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        raise ValueError(f"no step with seed {config.seed}")

    with pytest.raises(ValueError, match="no step with seed 1"):
        nb.compare(train, configuration(tmp_path), [{"seed": 1}, {"seed": 2}], processes=1)


def test_losses_that_are_not_finite_everywhere_are_an_error(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        inputs, labels = samples(160)
        return fits(config, ctx, (inputs * float("nan"), labels))

    with pytest.raises(TuningError, match=r"nothing could be measured: no change: not finite"):
        nb.compare(train, configuration(tmp_path), [{}], processes=1)


def test_a_batch_is_that_of_its_row(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        return fits(config, ctx, samples(160))

    choices = [{"train.batch_size": 16}, {"train.batch_size": 80}]
    table = nb.compare(train, configuration(tmp_path), choices, processes=1)
    assert [row.batch_size for row in table.rows] == [16, 80]
    assert f"at batch {table.chosen.batch_size};" in table.why


def test_the_faster_of_two_rounds_counts_and_a_failure_in_either() -> None:
    rounds = {"a": iter([10.0, 30.0]), "b": iter([20.0, 5.0]), "c": iter([50.0, 0.0])}

    def measure(row: SpeedRow) -> SpeedRow:
        speed = next(rounds[row.settings["name"]])
        if not speed:
            raise ValueError("too hot")
        return replace(row, samples_per_second=speed)

    rows = measure_in_turn([SpeedRow(settings={"name": name}) for name in rounds], measure)
    assert [row.samples_per_second for row in rows] == [30.0, 20.0, 0.0]
    assert [row.reason for row in rows] == ["", "", "ValueError: too hot"]


@pytest.mark.parametrize("choices", [[], {}, {"train.compile": True}])
def test_a_list_of_settings_is_needed(choices: Any) -> None:
    with pytest.raises(TuningError, match=r"settings is .*\n.*a list with at least one dict"):
        nb.compare(loads_slowly, None, choices)


def test_an_unknown_setting_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean 'train.compile'"):
        nb.compare(loads_slowly, config, [{}, {"train.compiled": True}], processes=1)
    assert not Path(config.data.marks).exists()
