"""The record of the samples of every optimizer step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from feeds import Augmented, AugmentedStream, contexts, listed, steps_of

import nbtoolkit as nb
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.training.data import take_apart
from nbtoolkit.training.loader import make_train_loader
from nbtoolkit.training.samples import read_samples
from nbtoolkit.worker.context import RunContext


def noting(folder: Path, *, ranks: int = 1, **more: Any) -> list[RunContext]:
    return contexts(folder, ranks=ranks, tracking__record_samples=True, train__max_steps=99, **more)


def walk(ctx: RunContext, *, size: int = 29, fit: int = 1, epoch: int = 1, **more: Any) -> None:
    feed = make_train_loader(ctx, ctx.config, take_apart(Augmented(size), collate=listed), fit=fit)
    steps_of(feed, epoch, **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (2, 3), (3, 2)])
def test_it_says_what_the_ranks_were_given(
    tmp_path: Path, ranks: int, passes: int, stream: bool
) -> None:
    def train(config: Any, ctx: Any) -> list[Any]:
        data = AugmentedStream(29) if stream else Augmented(29)
        feed = make_train_loader(ctx, config, take_apart(data, collate=listed))
        steps = {(epoch, i): one for epoch in (1, 2) for i, one in enumerate(steps_of(feed, epoch))}
        return [steps, {key: feed.sample_ids(*key) for key in steps}]

    [ctx] = noting(tmp_path / "one", train__gradient_accumulation_steps=passes)
    settings = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    config = ctx.config.with_overrides(settings)
    result = nb.launch(train, config, processes=ranks, resume="never", display="off")
    found = read_samples(result.paths)
    assert found == result.value[1]
    assert list(found) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    if not stream:  # whose ids are positions, not the numbers of the samples
        for key, ids in found.items():
            given = [index for steps, _ in result.values for index, _ in steps[key]]
            assert given == ids


def test_nothing_is_written_by_default(tmp_path: Path) -> None:
    [ctx] = contexts(tmp_path / "run")
    walk(ctx)
    assert not ctx.paths.samples(0).parent.exists()
    assert read_samples(ctx.paths) == {}


def test_steps_taken_again_count_once_on_however_many_ranks(tmp_path: Path) -> None:
    """Of different sizes, so that newer lines differ from older ones."""
    attempts = [(3, 29, 0), (2, 35, 1), (3, 31, 2)]  # ranks, samples, first step
    for ranks, size, first in attempts:
        for ctx in noting(tmp_path / "run", ranks=ranks):
            walk(ctx, size=size, skip=first)
    ctx = noting(tmp_path / "run", ranks=4)[0]
    walk(ctx, size=33, skip=2)  # killed before the other ranks came to it
    [alone] = contexts(tmp_path / "another")
    feeds = [
        make_train_loader(alone, alone.config, take_apart(Augmented(size)))
        for _, size, _ in attempts
    ]
    expected = {(1, step): feed.sample_ids(1, step) for step, feed in enumerate(feeds)}
    assert read_samples(ctx.paths) == expected


def test_a_step_that_not_all_ranks_came_to_is_left_out(tmp_path: Path) -> None:
    first, second = noting(tmp_path / "run", ranks=2)
    walk(first)
    walk(second, limit=1)
    assert list(read_samples(first.paths)) == [(1, 0)]


def test_each_fit_of_a_function_has_its_own(tmp_path: Path) -> None:
    [ctx] = noting(tmp_path / "run")
    walk(ctx, size=12)
    walk(ctx, size=5, fit=2)
    assert len(read_samples(ctx.paths)[1, 0]) == 12
    assert sorted(read_samples(ctx.paths, fit=2)[1, 0]) == [0, 1, 2, 3, 4]


def test_a_line_cut_short_spoils_no_other(tmp_path: Path) -> None:
    [ctx] = noting(tmp_path / "run")
    walk(ctx, limit=2)
    file = ctx.paths.samples(0)
    file.write_text(file.read_text()[:-20])
    assert list(read_samples(ctx.paths)) == [(1, 0)]
    [again] = noting(tmp_path / "run")
    walk(again, skip=1)
    assert list(read_samples(ctx.paths)) == [(1, 0), (1, 1), (1, 2)]


def test_a_full_disk_ends_the_notes_and_not_the_training(tmp_path: Path, capsys: Any) -> None:
    [ctx] = noting(tmp_path / "run")
    ctx.paths.samples(0).parent.mkdir()
    ctx.paths.samples(0).symlink_to("/dev/full")
    walk(ctx)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "samples are not recorded from epoch 1, step 0 on: [Errno 28] No space left" in said[0]


def test_the_lines_are_json_that_anyone_can_read(tmp_path: Path) -> None:
    first, second = noting(tmp_path / "run", ranks=2)
    walk(first, epoch=3, limit=1)
    walk(second, epoch=3, limit=1)
    lines = [json.loads(RunPaths.samples(first.paths, rank).read_text()) for rank in (0, 1)]
    assert [len(line.pop("ids")) for line in lines] == [6, 6]
    assert lines == [{"fit": 1, "ranks": 2, "epoch": 3, "step": 0}] * 2
