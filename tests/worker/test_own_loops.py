"""Custom loops with ctx.prepare: each sample once, the same steps on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import PlanError
from nbtoolkit.worker.context import RunContext

Batches = list[list[int]]


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self._size))


class OfItsOwn:
    """A batch sampler that draws from the global random stream of its process."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(20).tolist()
        return iter([order[:6], order[6:10], order[10:]])

    def __len__(self) -> int:
        return 3


class MadeBatches(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Items are batches."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index * 5, index * 5 + 5)


def of_replicas(ctx: RunContext, size: int, **more: Any) -> DataLoader[Any]:
    data = numbers(size)
    sampler = DistributedSampler(data, num_replicas=ctx.world_size, rank=ctx.rank, **more)
    return DataLoader(data, batch_size=4 // ctx.world_size, sampler=sampler)


def weighted(size: int) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, size + 1), size)


Make = Callable[[RunContext], DataLoader[Any]]
EVALUATED: dict[str, tuple[Make, Batches]] = {
    # The samples of each batch over all ranks; a rest of fewer samples than ranks joins.
    "21 in fours": (
        lambda ctx: DataLoader(numbers(21), batch_size=4),
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19, 20]],
    ),
    "7 in fours": (lambda ctx: DataLoader(numbers(7), batch_size=4), [[0, 1, 2, 3], [4, 5, 6]]),
    "workers": (
        lambda ctx: DataLoader(numbers(9), batch_size=4, num_workers=1),
        [[0, 1, 2, 3], [4, 5, 6, 7, 8]],
    ),
    "dropped": (lambda ctx: DataLoader(numbers(6), batch_size=4, drop_last=True), [[0, 1, 2, 3]]),
    "9 in fives": (
        lambda ctx: DataLoader(numbers(9), batch_size=5),
        [[0, 1, 2, 3, 4], [5, 6, 7, 8]],
    ),
    "single ones": (lambda ctx: DataLoader(numbers(5), batch_size=1), [[0, 1], [2, 3, 4]]),
    "replicas": (
        lambda ctx: of_replicas(ctx, 9, shuffle=False),
        [[0, 1, 2, 3], [4, 5, 6, 7, 8]],
    ),
    "stream": (lambda ctx: DataLoader(Stream(9), batch_size=4), [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),
    "stream with a worker": (
        lambda ctx: DataLoader(Stream(7), batch_size=4, num_workers=1),
        [[0, 1, 2, 3], [4, 5, 6]],
    ),
    "batches made": (
        lambda ctx: DataLoader(MadeBatches(), batch_size=None),
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]],
    ),
}
TRAINED: dict[str, Make] = {
    "shuffled": lambda ctx: DataLoader(numbers(20), batch_size=4, shuffle=True),
    "dropped": lambda ctx: DataLoader(numbers(21), batch_size=4, shuffle=True, drop_last=True),
    "replicas": lambda ctx: of_replicas(ctx, 20, seed=3),
    "weighted": lambda ctx: DataLoader(numbers(20), batch_size=4, sampler=weighted(20)),
    "subset": lambda ctx: DataLoader(
        numbers(40), batch_size=4, sampler=SubsetRandomSampler(range(20, 40))
    ),
    "batch sampler": lambda ctx: DataLoader(numbers(20), batch_sampler=OfItsOwn()),
    "batches of a sampler": lambda ctx: DataLoader(
        numbers(20), batch_sampler=BatchSampler(SubsetRandomSampler(range(20)), 4, False)
    ),
    "generator": lambda ctx: DataLoader(
        numbers(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(ctx.rank)
    ),
}


def walks(config: Config, ctx: RunContext) -> dict[str, Any]:
    """The batches of every kind of loader that this rank sees, and what is gathered of them."""
    found: dict[str, Any] = {}
    for name, (make, _) in EVALUATED.items():
        loader, gathered = ctx.prepare(make(ctx)), []
        with torch.no_grad():
            seen = []
            for batch in loader:
                batch = batch[0] if isinstance(batch, list) else batch
                seen.append(batch.tolist())
                gathered.append(ctx.accelerator.gather_for_metrics(batch).tolist())
        found[f"evaluated {name}"] = seen, gathered
    torch.manual_seed(ctx.rank)  # as of a function that seeds its ranks apart
    shuffled = ctx.prepare(DataLoader(numbers(21), batch_size=5, shuffle=True))
    found["lengths"] = [len(shuffled), len(list(shuffled)), sum(len(x) for (x,) in shuffled)]
    for name, make_loader in TRAINED.items():
        loader = ctx.prepare(make_loader(ctx))
        found[f"trained {name}"] = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    return found


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank saw, by how many there were."""
    folder = str(tmp_path_factory.mktemp("walks"))
    config = Config().with_overrides({"tracking.mlflow": False, "runtime.output_dir": folder})
    return {
        ranks: nb.launch(walks, config, processes=ranks, display="off").values for ranks in (1, 2)
    }


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def together(parts: list[Batches]) -> Batches:
    """The ranks' parts of each batch, one behind the other."""
    return [joined(batch) for batch in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_sees_each_sample_once_and_gathers_it_once(
    walked: dict[int, list[dict[str, Any]]], name: str
) -> None:
    alone, _ = walked[1][0][f"evaluated {name}"]
    seen, gathered = zip(*(rank[f"evaluated {name}"] for rank in walked[2]), strict=True)
    expected = EVALUATED[name][1]
    assert together(list(seen)) == expected
    assert joined(alone) == joined(expected)
    for batch, *parts in zip(expected, *seen, strict=True):
        assert [len(part) for part in parts] == [len(batch) - len(batch) // 2, len(batch) // 2]
    assert gathered == (expected, expected)


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_has_the_samples_that_one_rank_gives_it(
    walked: dict[int, list[dict[str, Any]]], name: str
) -> None:
    ranks = [rank[f"trained {name}"] for rank in walked[2]]
    for epoch in (0, 1):
        steps = together([rank[epoch] for rank in ranks])
        assert [len(step) for step in steps] == ([6, 4, 10] if name == "batch sampler" else [4] * 5)
        assert name == "weighted" or len({*joined(steps)}) == 20
    if name in ("shuffled", "dropped", "replicas"):
        assert [together([rank[epoch] for rank in ranks]) for epoch in (0, 1)] == walked[1][0][
            f"trained {name}"
        ]
    if name != "replicas":  # without set_epoch that one repeats its order, as in torch
        assert ranks[0][0] != ranks[0][1]


def test_replicas_take_the_steps_of_the_script_they_come_from(
    walked: dict[int, list[dict[str, Any]]],
) -> None:
    data = numbers(20)
    samplers = [DistributedSampler(data, num_replicas=2, rank=rank, seed=3) for rank in (0, 1)]
    batches = [list(BatchSampler(sampler, 2, drop_last=False)) for sampler in samplers]
    expected = [sorted(step) for step in together(batches)]
    ranks = [rank["trained replicas"][0] for rank in walked[2]]
    assert [sorted(step) for step in together(ranks)] == expected


# --- the example of docs/own-loop.md, against scikit-learn ---


def evaluates(config: Config, ctx: RunContext) -> dict[str, Any]:
    """An own loop that uses ctx.prepare and nothing else of ours."""
    torch.manual_seed(0)
    x = torch.randn(203, 8)
    y = x[:, :3].argmax(dim=1)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(x[:96], y[:96]), batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(x, y), batch_size=16)
    model, optimizer, loader, held_out = ctx.prepare(model, optimizer, loader, held_out)
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        ctx.accelerator.backward(loss)
        optimizer.step()
    model.eval()
    sums = torch.zeros(3, device=ctx.device)
    with torch.no_grad():
        for inputs, targets in held_out:
            scores = model(inputs)
            total = F.cross_entropy(scores, targets, reduction="sum")
            right = (scores.argmax(1) == targets).sum()
            sums += torch.stack([total, right, torch.tensor(len(targets))])
        loss_sum, right_sum, samples = ctx.accelerator.reduce(sums).tolist()
        chances = ctx.unwrap(model)(x).double().softmax(1)
    return {
        "loss": loss_sum / samples,
        "accuracy": right_sum / samples,
        "samples": samples,
        "chances": chances.numpy(),
        "y": y.numpy(),
        "plain": type(ctx.unwrap(model)).__name__,
    }


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_metrics_of_an_own_loop_are_scikit_learns(tmp_path: Any, ranks: int) -> None:
    config = Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    )
    found = nb.launch(evaluates, config, processes=ranks, display="off").value
    assert found["samples"] == 203
    chances, y = found["chances"], found["y"]
    assert found["accuracy"] == pytest.approx(accuracy_score(y, chances.argmax(1)), abs=1e-6)
    assert found["loss"] == pytest.approx(log_loss(y, chances), abs=1e-5)
    assert found["plain"] == "Sequential"


# --- compiled models ---


def compiled(config: Config, ctx: RunContext) -> list[list[str]]:
    """A loop that compiles its model, saves it in both ways, and is resumed."""
    torch.manual_seed(0)
    model: Any = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), backend="eager")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if config.model.late:
        model = ctx.unwrap(model)
    model, optimizer = ctx.prepare(model, optimizer)
    if config.model.late:
        model = torch.compile(model, backend="eager")
    for _ in range(2):
        loss = model(torch.ones(2, 4)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ctx.save({"model": model.state_dict()}, kind="whole")
    model.load_state_dict(ctx.load("whole")["model"])  # type: ignore[index]
    plain = ctx.unwrap(model)
    ctx.save({"model": plain.state_dict()})
    ctx.save(model.state_dict(), kind="flat")
    return [[*plain.state_dict()], [type(plain).__name__]]


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "late"), [(1, False), (2, False), (2, True)])
def test_weights_of_a_compiled_model_have_the_names_of_the_plain_one(
    tmp_path: Any, ranks: int, late: bool
) -> None:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path), "model.late": late}
    result = nb.launch(compiled, settings, processes=ranks, display="off")
    assert result.value == [NAMES, ["Sequential"]]
    folder = result.paths.checkpoints
    assert list(torch.load(folder / "last.pt", weights_only=True)["model"]) == NAMES
    flat = torch.load(folder / "flat.pt", weights_only=True)
    assert [name.removeprefix("module.") for name in flat] == NAMES
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    result.load_into(net)
    again = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), backend="eager")
    result.load_into(again)
    for name in ("flat", "whole"):
        other = nb.load_model(
            folder / f"{name}.pt", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        )
        for weights in (other.state_dict(), again._orig_mod.state_dict()):
            assert all(torch.equal(weights[one], net.state_dict()[one]) for one in NAMES)


# --- uneven batches ---


def rows_of(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(size))[:, None])


class Rows(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self._size))[:, None])


class Uneven:
    """A batch sampler with an uneven batch, which nobody can know before."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4], [5, 6]])

    def __len__(self) -> int:
        return 3


def replicas_of_rows(ctx: RunContext) -> DataLoader[Any]:
    data = rows_of(21)
    sampler = DistributedSampler(data, num_replicas=ctx.world_size, rank=ctx.rank)
    return DataLoader(data, batch_size=2, sampler=sampler)


SHUFFLED = (
    r"DataLoader 1 of ctx.prepare \(TensorDataset of 21 samples, batch_size=4\): the last "
    r"batch has 1 sample \(21 in batches of 4\), which 2 ranks[\s\S]*multiple of 2, and drop_last"
)
UNEVEN: dict[str, tuple[Make, str, int]] = {
    # How it is refused, and the steps before that.
    "shuffled": (lambda ctx: DataLoader(rows_of(21), batch_size=4, shuffle=True), SHUFFLED, 0),
    "in order": (lambda ctx: DataLoader(rows_of(21), batch_size=4), r"\(21 in batches of 4\)", 0),
    "replicas": (replicas_of_rows, r"\(21 in batches of 4\)", 0),
    "size": (
        lambda ctx: DataLoader(rows_of(20), batch_size=5),
        r"a batch has 5 samples, which 2 ranks[\s\S]*multiple of 2",
        0,
    ),
    "single ones": (
        lambda ctx: DataLoader(rows_of(20), batch_size=1),
        r"a batch has 1 sample, which 2 ranks[\s\S]*multiple of 2",
        0,
    ),
    "stream": (lambda ctx: DataLoader(Rows(11), batch_size=4), r"a batch of 3 samples", 2),
    "workers": (
        lambda ctx: DataLoader(rows_of(7), batch_sampler=Uneven(), num_workers=1),
        r"\(TensorDataset of 7 samples\): a batch of 3 samples",
        1,
    ),
}
BACKWARD: dict[str, Callable[[RunContext, torch.Tensor], None]] = {
    "accelerator": lambda ctx, loss: ctx.accelerator.backward(loss),
    "plain": lambda ctx, loss: loss.backward(),
}


def first(batch: Any) -> torch.Tensor:
    rows: torch.Tensor = batch[0] if isinstance(batch, list) else batch
    return rows


def evaluated_rows(ctx: RunContext, model: nn.Module, loader: Any) -> list[float]:
    """As accelerate's examples: no_grad around the call of the model, not around the loop."""
    gathered: list[float] = []
    for batch in loader:
        with torch.no_grad():
            model(first(batch))
        gathered += ctx.accelerator.gather_for_metrics(first(batch)).flatten().tolist()
    return sorted(gathered)


def uneven(config: Config, ctx: RunContext) -> dict[str, Any]:
    """For each kind of loader: what it evaluates, and how a loop that trains with it ends."""
    found: dict[str, Any] = {}
    for name, (make, *_) in UNEVEN.items():
        for how, backward in BACKWARD.items():
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
            held_out = make(ctx)
            model, optimizer, loader, held_out = ctx.prepare(model, optimizer, make(ctx), held_out)
            found[f"{name} evaluated"] = evaluated_rows(ctx, model, held_out)
            steps = 0
            try:
                for batch in loader:
                    loss = model(first(batch)).mean()
                    optimizer.zero_grad()
                    backward(ctx, loss)
                    optimizer.step()
                    steps += 1
            except PlanError as error:
                found[f"{name} {how}"] = str(error), steps
    return found


def mixed(config: Config, ctx: RunContext) -> int:
    """Trains on even batches between uneven ones that are only evaluated."""
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001)
    even = DataLoader(rows_of(20), batch_size=4, shuffle=True)
    odd = DataLoader(rows_of(7), batch_size=7, shuffle=True)
    longer = DataLoader(rows_of(7), batch_size=2, shuffle=True)
    model, optimizer, even, odd, longer = ctx.prepare(model, optimizer, even, odd, longer)
    model(first(next(iter(odd))))  # with gradients, but without a backward pass
    kept = iter(longer)  # a loop that pauses: its last batch will be uneven
    steps = 0
    for batch in even:
        loss = model(first(batch)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model(first(next(iter(odd))))
            if steps < 2:
                model(first(next(kept)))
        steps += 1
    return steps


@pytest.fixture(scope="module")
def uneven_runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("uneven"))
    config = Config().with_overrides({"tracking.mlflow": False, "runtime.output_dir": folder})
    return nb.launch(uneven, config, processes=2, display="off").values


@pytest.mark.parametrize("how", BACKWARD)
@pytest.mark.parametrize("name", UNEVEN)
def test_a_backward_pass_for_an_uneven_batch_names_the_loader_on_every_rank(
    uneven_runs: list[dict[str, Any]], name: str, how: str
) -> None:
    for rank in uneven_runs:
        text, steps = rank[f"{name} {how}"]
        assert steps == UNEVEN[name][2]
        with pytest.raises(PlanError, match=UNEVEN[name][1]):
            raise PlanError(text)


@pytest.mark.parametrize("name", UNEVEN)
def test_no_grad_around_the_model_is_enough_for_an_evaluation(
    uneven_runs: list[dict[str, Any]], name: str
) -> None:
    samples = {"size": 20, "single ones": 20, "stream": 11, "workers": 7}.get(name, 21)
    for rank in uneven_runs:
        assert rank[f"{name} evaluated"] == list(range(samples))


def test_uneven_batches_of_other_loops_do_not_stop_a_training(tmp_path: Any) -> None:
    config = Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    )
    assert nb.launch(mixed, config, processes=2, display="off").values == [5, 5]


def test_a_shuffled_loader_may_be_one_of_an_evaluation(
    walked: dict[int, list[dict[str, Any]]],
) -> None:
    ranks = [rank["lengths"] for rank in walked[2]]
    assert [lengths[:2] for lengths in ranks] == [[4, 4], [4, 4]]
    assert sum(samples for *_, samples in ranks) == 21


# --- refusals ---


def other_replicas(ctx: RunContext) -> None:
    data = numbers(20)
    sampler = DistributedSampler(data, num_replicas=4, rank=ctx.rank)
    ctx.prepare(DataLoader(data, batch_size=4, sampler=sampler))


def one_sample(ctx: RunContext) -> None:
    with torch.no_grad():
        next(iter(ctx.prepare(DataLoader(numbers(1), batch_size=4))))


class Divided(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self._size) + 100 * torch.distributed.get_rank())


def divided_stream(ctx: RunContext) -> None:
    next(iter(ctx.prepare(DataLoader(Divided(8), batch_size=4))))


class Endless(OfItsOwn):
    __len__ = None  # type: ignore[assignment]


def endless(ctx: RunContext) -> None:
    ctx.prepare(DataLoader(numbers(20), batch_sampler=Endless()))


class EndlessSampler:
    def __iter__(self) -> Iterator[int]:
        return cycle(range(20))


def endless_sampler(ctx: RunContext) -> None:
    ctx.prepare(DataLoader(numbers(20), batch_size=4, sampler=EndlessSampler()))


def texts(ctx: RunContext) -> None:
    loader = DataLoader(Stream(8), batch_size=4, collate_fn=lambda batch: "text")
    next(iter(ctx.prepare(loader)))


def wrapped(ctx: RunContext) -> None:
    ctx.accelerator  # noqa: B018  (joins the ranks)
    ctx.prepare(nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))


REFUSED: dict[Callable[[RunContext], None], str] = {
    other_replicas: r"by 4, but this run has 2 ranks[\s\S]*delete sampler=DistributedSampler",
    one_sample: r"only batch has 1 samples for 2 ranks[\s\S]*fewer ranks",
    divided_stream: r"ranks read different batches[\s\S]*move its batches to ctx.device",
    endless: r"Endless has no length[\s\S]*__len__",
    endless_sampler: r"EndlessSampler has no length[\s\S]*__len__",
    texts: r"type str cannot be shared[\s\S]*collate_fn",
    wrapped: r"already wrapped: it is a DistributedDataParallel[\s\S]*delete the line",
}


def refusals(config: Config, ctx: RunContext) -> dict[str, str]:
    found = {}
    for asked in REFUSED:
        try:
            asked(ctx)
        except PlanError as error:
            found[asked.__name__] = str(error)
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = str(tmp_path_factory.mktemp("refused"))
    config = Config().with_overrides({"tracking.mlflow": False, "runtime.output_dir": folder})
    return nb.launch(refusals, config, processes=2, display="off").values


@pytest.mark.parametrize("asked", REFUSED, ids=lambda one: one.__name__)
def test_what_cannot_be_exact_is_refused_on_every_rank(
    refused: list[dict[str, str]], asked: Callable[[RunContext], None]
) -> None:
    for rank in refused:
        with pytest.raises(PlanError, match=REFUSED[asked]):
            raise PlanError(rank[asked.__name__])
