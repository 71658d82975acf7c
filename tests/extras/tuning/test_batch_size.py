"""The largest micro-batch that fits, against brute force and under real limits."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from fits import configured, model_of, samples
from limits import Hungry, limit_addresses, memory_cgroup
from torch import nn

import nbtoolkit as nb
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning import batch_size
from nbtoolkit.extras.tuning.answer import Subject
from nbtoolkit.extras.tuning.batch_size import MeasuredBatch
from nbtoolkit.extras.tuning.probe import probe


def train(config: Any, ctx: nb.RunContext) -> dict[str, float]:
    """Rank 1 (or the only one) has memory for so many samples."""
    data = config.data.to_dict()
    limited = ctx.rank == ctx.world_size - 1
    if limited and data.get("cgroup"):
        Path(data["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    elif limited and data.get("megabytes"):
        limit_addresses(data["megabytes"])

    def step(model: nn.Module, batch: Any) -> Any:
        if limited and len(batch[0]) > data.get("fits", 1e9):
            raise MemoryError(f"{len(batch[0])} samples")
        time.sleep(len(batch[0]) * data.get("seconds_per_sample", 0.0))
        return model(batch[0]), batch[1]

    hungry = [Hungry(8, touches=False)] if data.get("megabytes") else []
    hungry += [Hungry(44, touches=True)] if data.get("cgroup") else []
    model = model_of(*hungry)
    loss = nn.functional.cross_entropy
    return nb.fit(ctx, config, model, samples(data.get("samples", 400)), None, loss=loss, step=step)


@pytest.fixture(autouse=True)
def no_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a probe may take a minute."""
    monkeypatch.setattr(batch_size, "SECONDS", 1e6)


def made(folder: Path, **data: Any) -> nb.Config:
    more = {f"data.{name}": value for name, value in data.items()}
    settings = {"runtime.output_dir": str(folder), "train.batch_size": 24, **more}
    return configured(overrides=settings)


def found(one: nb.BatchSize) -> dict[int, bool]:
    return {batch.samples: not batch.reason for batch in one.rows}


@pytest.mark.long
def test_it_finds_what_brute_force_finds(tmp_path: Path) -> None:
    config = made(tmp_path, fits=11)
    fits = []
    for size in range(1, 17):
        settings = {"train.batch_size": 2 * size}
        settings["train.gradient_accumulation_steps"] = 1
        settings["distributed.world_size"] = 2
        result = probe(Subject(train, config), settings, steps=4)
        fits += [size] * (result.status == "measured")
    one = nb.find_batch_size(train, config, processes=2)
    assert fits == [*range(1, 12)]
    assert one.largest == max(fits)
    assert found(one) == {8: True, 10: True, 11: True, 12: False, 16: False}
    assert one.settings["train.gradient_accumulation_steps"] == 2


@pytest.mark.long
def test_an_answer_is_kept_until_it_is_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made(tmp_path, fits=9)
    one = nb.find_batch_size(train, config)
    assert (one.largest, one.kept, one.stopped) == (9, False, "10 ran out of memory")
    assert "micro-batches of up to 9 samples fit (10 ran out of memory)" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuning.json", "tuning.lock"]
    began = time.monotonic()
    again = nb.find_batch_size(train, config)
    assert again.kept
    assert time.monotonic() - began < 1
    assert again == one
    assert "force=True measures" in capsys.readouterr().out
    assert "out of memory" in repr(again)
    assert again._repr_html_().count("<img alt=") == 2
    forced = nb.find_batch_size(train, config, force=True, largest=8)
    assert not forced.kept
    assert forced.stopped == "no more than 8 were tried"


@pytest.mark.long
def test_an_address_space_limit_on_one_of_two_ranks_counts_for_both(tmp_path: Path) -> None:
    one = nb.find_batch_size(train, made(tmp_path, megabytes=300), processes=2)
    assert 16 <= one.largest < 38  # of 8 MB each; torch itself needs some of the 300
    assert "ran out of memory" in one.stopped
    result = nb.launch(
        train,
        made(tmp_path, megabytes=300).with_overrides(one.settings),
        processes=2,
        display="off",
    )
    assert result.status == "completed"


@pytest.mark.long
def test_a_cgroups_limit_on_one_of_two_ranks_counts_for_both(tmp_path: Path) -> None:
    """The kernel kills the rank: there is no exception."""
    with memory_cgroup(f"nbtoolkit-test-{os.getpid()}", megabytes=200) as folder:
        one = nb.find_batch_size(train, made(tmp_path, cgroup=str(folder)), processes=2)
    assert one.largest == 4  # of 44 MB each
    assert found(one) == {4: True, 5: False, 6: False, 8: False}
    assert "SIGKILL" in next(row.reason for row in one.rows if row.reason)


@pytest.mark.long
def test_the_data_set_or_the_cpus_throughput_ends_it(tmp_path: Path) -> None:
    small = nb.find_batch_size(train, made(tmp_path, samples=20))
    assert (small.largest, small.stopped) == (16, "a step takes the whole data set")
    slow = nb.find_batch_size(train, made(tmp_path, seconds_per_sample=0.004, samples=5000))
    assert slow.stopped == "two doublings gained less than 5%"
    assert 24 <= slow.largest <= 1024


@pytest.mark.long
def test_its_time_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "SECONDS", 0.01)
    one = nb.find_batch_size(train, made(tmp_path))
    assert (one.largest, one.stopped) == (8, "nothing larger was tried: 1:00 are over")


@pytest.mark.long
def test_a_model_that_fits_no_batch(tmp_path: Path) -> None:
    match = r"not even one sample per rank fits(.|\n)*Allowed: a model(.|\n)*Do now:  use a smaller"
    with pytest.raises(TuningError, match=match):
        nb.find_batch_size(train, made(tmp_path, fits=0))


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="largest is 0\n  Allowed: 1 and more"):
        nb.find_batch_size(train, made(tmp_path), largest=0)


def test_the_settings_keep_the_batch_with_the_fewest_steps() -> None:
    rows = tuple(
        MeasuredBatch(samples=size, samples_per_second=rate, reason="" if rate else "no")
        for size, rate in ((2, 10.0), (4, 100.0), (5, 101.0), (6, 0.0))
    )
    one = nb.BatchSize(rows=rows, stopped="", batch_size=24, ranks=2)
    assert (one.largest, one.fastest, one.accumulation_steps) == (5, 4, 3)
    settings = made(Path("out")).with_overrides(one.settings).train
    assert (settings.batch_size, settings.gradient_accumulation_steps) == (24, 3)
