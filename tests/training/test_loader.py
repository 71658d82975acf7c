"""The train loader: the same global batches and augmentations for any ranks, splits and workers."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feeds import Augmented, AugmentedStream, Known, contexts, draws, listed, steps_of, together
from torch.utils.data import Subset

import nbtoolkit as nb
from nbtoolkit.errors import FitError
from nbtoolkit.training.data import make_source, take_apart
from nbtoolkit.training.loader import make_train_loader

CPU = torch.device("cpu")
X = torch.arange(37)


def walked(folder: Path, data: Any, epoch: int = 1, *, ranks: int = 1, **more: Any) -> Any:
    """The global batches of an epoch, by step, and of each rank what it takes of them."""
    steps = {name: more.pop(name) for name in ("skip", "limit") if name in more}
    each = [
        steps_of(
            make_train_loader(ctx, ctx.config, take_apart(data, collate=listed)), epoch, **steps
        )
        for ctx in contexts(folder, ranks=ranks, **more)
    ]
    return together(each)


# --- which samples -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("skip", [0, 2, 3, 4])
def test_what_is_skipped_and_what_is_left_make_the_epoch(
    tmp_path: Path, ranks: int, passes: int, skip: int
) -> None:
    more = {"ranks": ranks, "train__gradient_accumulation_steps": passes}
    whole = walked(tmp_path, X, 2)
    done = walked(tmp_path, X, 2, limit=skip, **more)
    left = walked(tmp_path, X, 2, skip=skip, **more)
    assert done + left == whole
    assert [len(step) for step in whole] == [12, 12, 12, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sample_ids_are_those_that_were_handed_out(tmp_path: Path, ranks: int) -> None:
    ctx = contexts(tmp_path, ranks=ranks)[-1]
    feed = make_train_loader(ctx, ctx.config, take_apart(X))
    assert feed.steps == 4
    ids = [feed.sample_ids(3, step) for step in range(4)]
    assert ids == [[int(one) for one in step] for step in walked(tmp_path, X, 3, ranks=ranks)]
    assert feed.sample_ids(3, 4) == []


def test_what_is_skipped_is_not_loaded(tmp_path: Path) -> None:
    class Counted(Augmented):
        loaded: list[int] = []  # noqa: RUF012  (of all copies)

        def __getitem__(self, index: int) -> Any:
            self.loaded.append(index)
            return super().__getitem__(index)

    [ctx] = contexts(tmp_path)
    data = Counted(1_000_000)
    feed = make_train_loader(ctx, ctx.config, take_apart(data, collate=listed))
    assert feed.steps == 83_334
    batch, _ = next(feed.batches(1, skip=75_000))
    loaded = [*dict.fromkeys(data.loaded)]  # twice: once to see that samples are random
    assert [index for index, _ in batch] == loaded == feed.sample_ids(1, 75_000)


@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (2, 3), (3, 1)])
def test_drop_last_leaves_out_the_uneven_step_only(tmp_path: Path, ranks: int, passes: int) -> None:
    more = {"ranks": ranks, "train__gradient_accumulation_steps": passes}
    kept = walked(tmp_path, X)
    assert walked(tmp_path, X, train__drop_last=True, **more) == kept[:3]
    assert walked(tmp_path, X, train__drop_last=True, limit=9, skip=2, **more) == kept[2:3]
    even = walked(tmp_path, X[:36])
    assert walked(tmp_path, X[:36], train__drop_last=True, **more) == even
    ctx = contexts(tmp_path, train__drop_last=True, **more)[0]
    feed = make_train_loader(ctx, ctx.config, take_apart(X))
    assert (feed.steps, feed.sample_ids(1, 3)) == (3, [])


# --- what is drawn for them ----------------------------------------------------------------------

WAYS = [(1, 1), (1, 2), (2, 1), (3, 2)]


def on_ranks(config: Any, ctx: Any) -> dict[str, Any]:
    """By kind of data set and number of workers: two epochs' steps of this rank."""
    found = {}
    for kind, data in (("map", Augmented(37)), ("stream", AugmentedStream(37))):
        for workers in (0, 2):
            changed = config.with_overrides({"train.num_workers": workers})
            feed = make_train_loader(ctx, changed, take_apart(data, collate=listed))
            found[f"{kind}, {workers} workers"] = [
                step for epoch in (1, 2) for step in steps_of(feed, epoch)
            ]
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Any]]:
    """By ranks and passes, and by kind and workers: what real ranks were given, step by step."""
    folder, found = tmp_path_factory.mktemp("ranks"), {}
    for ranks, passes in WAYS:
        [ctx] = contexts(folder, train__gradient_accumulation_steps=passes, train__max_steps=8)
        config = ctx.config.with_overrides(
            {"runtime.output_dir": str(folder / "runs"), "tracking.mlflow": False}
        )
        result = nb.launch(on_ranks, config, processes=ranks, resume="never", display="off")
        found[ranks, passes] = {
            name: together([value[name] for value in result.values]) for name in result.value
        }
    return found


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_ranks_passes_and_workers_change_no_sample_and_nothing_drawn_for_it(
    launched: Any, kind: str
) -> None:
    expected = launched[1, 1][f"{kind}, 0 workers"]
    assert [len(step) for step in expected] == [12, 12, 12, 1] * 2
    for way in WAYS:
        for workers in (0, 2):
            assert launched[way][f"{kind}, {workers} workers"] == expected, (way, workers)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_every_sample_comes_once_an_epoch_and_is_drawn_anew_in_the_next(
    launched: Any, kind: str
) -> None:
    steps = launched[3, 2][f"{kind}, 2 workers"]
    epochs = [[one for step in part for one in step] for part in (steps[:4], steps[4:])]
    assert [sorted(index for index, _ in epoch) for epoch in epochs] == [list(range(37))] * 2
    assert [index for index, _ in epochs[0]] != [index for index, _ in epochs[1]]
    drawn = [one for epoch in epochs for _, three in epoch for one in three]
    assert len({round(one, 9) for one in drawn}) > 0.99 * len(drawn)  # float32 may meet by chance


@pytest.mark.parametrize(("ranks", "passes"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_data_set_smaller_than_the_ranks_has_stand_ins(
    tmp_path: Path, ranks: int, passes: int, stream: bool
) -> None:
    def tiny(config: Any, ctx: Any) -> list[tuple[list[int], int, float, bool]]:
        import torch

        from nbtoolkit.training.data import take_apart
        from nbtoolkit.training.loader import make_train_loader

        data = range(1) if not stream else {5}
        feed = make_train_loader(ctx, config, take_apart(data))
        return [
            (batch.tolist(), share.samples, share.weight, share.last)
            for batch, share in feed.batches(1)
            if isinstance(batch, torch.Tensor)
        ]

    [ctx] = contexts(
        tmp_path / "one", train__gradient_accumulation_steps=passes, train__max_steps=1
    )
    config = ctx.config.with_overrides(
        {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    )
    result = nb.launch(tiny, config, processes=ranks, resume="never", display="off")
    sample = [5] if stream else [0]
    stand_in, real = (sample, 0, 0.0, True), (sample, 1, float(ranks), True)
    assert sorted(result.values) == [[stand_in]] * (ranks - 1) + [[real]]


def test_augmentation_does_not_disturb_the_models_own_draws(tmp_path: Path) -> None:
    def noise(workers: int, data: Any, collate: Any = listed) -> list[Any]:
        [ctx] = contexts(tmp_path, train__num_workers=workers, train__max_steps=9)
        feed = make_train_loader(ctx, ctx.config, take_apart(data, collate=collate))
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        np.random.standard_normal()  # NumPy draws two at a time, and keeps the second
        return [(draws(), np.random.standard_normal()) for _ in feed.batches(1)]

    expected = noise(0, X, collate=None)  # nobody else draws
    for data in (Augmented(37), Known(37)):
        assert noise(0, data) == noise(2, data) == expected


def test_a_subset_is_augmented_like_the_set(tmp_path: Path) -> None:
    """Its ``__getitems__`` would load a whole batch at once."""
    data = Subset(Augmented(50), range(37))
    assert walked(tmp_path, data) == walked(tmp_path, Augmented(37))


def test_collate_goes_on_with_the_draws_of_the_last_sample() -> None:
    def drawing(samples: list[Any]) -> Any:
        return samples[-1], draws()

    found = []
    for workers in (0, 2):
        source = make_source(
            take_apart(Augmented(9), collate=drawing), CPU, workers=workers, seed=3
        )
        found.append(list(source.batches(torch.arange(9), [4, 4, 1], epoch=2)))
    assert found[0] == found[1]
    assert all(sample[1] != more for sample, more in found[0])


def test_validation_draws_the_same_every_time() -> None:
    def drawn(**more: Any) -> list[Any]:
        source = make_source(take_apart(Augmented(5), collate=listed), CPU, **more)
        return [one for batch in source.batches(torch.arange(5), [2, 3]) for one in batch]

    assert drawn() == drawn() == drawn(workers=2)
    assert drawn(seed=1) != drawn()


# --- what goes wrong -----------------------------------------------------------------------------


class Odd(Exception):
    """Cannot be made again from its text, as the DataLoader would."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.where = code, where


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise Odd(3, where="here")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_sample_is_the_users_and_names_the_sample(workers: int) -> None:
    source = make_source(take_apart(Broken(9)), CPU, workers=workers)
    with pytest.raises(Odd, match="code 3") as caught:
        list(source.batches(torch.arange(9), [5, 4]))
    assert (caught.value.code, caught.value.where) == (3, "here")
    assert caught.value.__notes__ == ["[nbtoolkit] while loading sample 7 of the data set"]
    assert caught.traceback[-1].name == "__getitem__"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_collate_names_the_batch(workers: int) -> None:
    data = [torch.zeros(1), torch.zeros(1), torch.zeros(2)]
    source = make_source(take_apart(data), CPU, workers=workers)
    with pytest.raises(RuntimeError, match="equal size") as caught:
        list(source.batches(torch.arange(3), [1, 2]))
    assert caught.value.__notes__ == ["[nbtoolkit] while loading a batch of the samples [1, 2]"]


def test_workers_that_could_hand_nothing_over_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's sockets have no room for a long TMPDIR, and torch would wait for ever."""
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(
        FitError, match=r"workers would hang(.|\n)*at most 75 bytes(.|\n)*TMPDIR set"
    ):
        make_source(take_apart(Augmented(3)), CPU, workers=2)
    make_source(take_apart(Augmented(3)), CPU, workers=0)


def test_a_sample_that_ends_an_iteration_does_not_end_the_epoch() -> None:
    class Ending(Augmented):
        def __getitem__(self, index: int) -> Any:
            return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(make_source(take_apart(Ending(3)), CPU).batches(torch.arange(3), [3]))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (torch.zeros(0), r"the training set is empty\n.*one sample[\s\S]*check the split"),
        ([], "the training set is empty"),
        (Known(0), "the training set is empty"),
        (
            torch.zeros(11),
            r"drop_last leaves no step: .* 11 samples, fewer than the 12 [\s\S]*false",
        ),
        (Known(11), r"drop_last leaves no step: .* 11 samples"),
        (AugmentedStream(99), r"a AugmentedStream has no length, and[\s\S]*train\.max_steps: <"),
    ],
    ids=["empty", "empty list", "empty stream", "short", "short stream", "unknown"],
)
def test_what_cannot_be_fed_is_refused(tmp_path: Path, data: Any, what: str) -> None:
    [ctx] = contexts(tmp_path, train__drop_last=True)
    with pytest.raises(FitError, match=what):
        make_train_loader(ctx, ctx.config, take_apart(data))
