"""Loader processes and speed-ups: chosen by measurement, kept, and failures shown as rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fits import model_of, samples
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.errors import TuningError
from nbtoolkit.tasks import digits


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
    found = nb.find_num_workers(loads_slowly, config, processes=1)
    tried = [row.settings["train.num_workers"] for row in found.rows]
    assert tried == [0, 1, 2][: len(tried)]
    rates = [row.samples_per_second for row in found.rows]
    good = [number for number, rate in zip(tried, rates, strict=True) if rate * 1.03 >= max(rates)]
    assert found.settings == {"train.num_workers": good[0]}
    assert good[0] > 0
    assert rates[-1] > rates[0]
    assert calls(config) == len(tried)
    assert f"train.num_workers: {good[0]}: " in capsys.readouterr().out
    assert nb.find_num_workers(loads_slowly, config, processes=1).kept
    assert calls(config) == len(tried)


@pytest.mark.long
def test_a_setting_that_fails_is_a_row_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: Any, ctx: Any) -> Any:
        if config.train.compile:
            raise RuntimeError("no compiler here")
        # As if this layout were faster.
        return fits(config, ctx, samples(160) if config.train.channels_last else Slow())

    config = configuration(tmp_path)
    found = nb.find_speedups(train, config, precision=False, processes=1)
    base, layout, compiled = found.rows
    assert dict(base.settings) == {}
    assert found.settings == {"train.channels_last": True}
    assert dict(compiled.settings) == {"train.channels_last": True, "train.compile": True}
    assert compiled.reason == "RuntimeError: no compiler here"
    assert compiled.loss is None
    assert layout.loss == pytest.approx(base.loss, abs=1e-5)
    assert "* train.channels_last: true" in capsys.readouterr().out
    before = calls(config)
    kept = nb.find_speedups(train, config, precision=False, processes=1)
    assert kept.kept
    assert kept == found
    assert calls(config) == before


def test_only_precisions_of_the_device_are_tried(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        return fits(config, ctx, samples(160))

    config = configuration(tmp_path)
    found = nb.find_speedups(train, config, channels_last=False, compile=False, processes=1)
    assert [dict(row.settings) for row in found.rows] == [{}, {"train.precision": "bf16"}]
    assert all(row.memory > 0.05 for row in found.rows)
    assert "samples/s" in repr(found)


def test_a_base_that_fails_is_an_error(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        inputs, labels = samples(160)
        return fits(config, ctx, (inputs * float("nan"), labels))

    with pytest.raises(TuningError, match="not finite with no change"):
        nb.find_speedups(train, configuration(tmp_path), processes=1)


@pytest.mark.long
def test_data_in_memory_get_no_workers(tmp_path: Path) -> None:
    config = configuration(tmp_path, **{"train.batch_size": 512, "model.hidden": 4096})
    found = nb.find_num_workers(digits.train, config, processes=1)
    assert [row.settings["train.num_workers"] for row in found.rows] == [0]
    assert found.settings == {"train.num_workers": 0}
