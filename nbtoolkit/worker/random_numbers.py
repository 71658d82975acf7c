"""Seed the random numbers that a rank draws: for other samples than the other ranks', others."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nbtoolkit.run.paths import RunPaths

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbtoolkit.worker.context import RunContext

Batch = TypeVar("Batch")


# Bytes of the state of a Mersenne Twister besides its position, an int.
_TWISTER_KEY = 624 * 4


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that is a function of ``parts``; other parts give an unrelated seed."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(*parts: object) -> None:
    """Seed Python's, NumPy's and torch's global generators (the CPU's) by ``parts``."""
    import numpy as np
    import torch

    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would also seed the GPU's generator, which dropout draws from; without a GPU
    # in use it queues the call, with its stack, until there is one: 1.4 ms, and kept for ever.
    torch.default_generator.manual_seed(seed)


def seed_rank(device: torch.device, *parts: object) -> None:
    """Seed this rank's generators: the global ones of the CPU, and ``device``'s, by ``parts``."""
    import torch

    seed_generators(*parts)
    if device.type == "cuda":
        torch.cuda.manual_seed(derive_seed(*parts))


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore this process's generators after a block that draws or seeds (takes 70 us).

    The model's own draws (dropout) then do not depend on where, and how far ahead, samples load.
    """
    states = _states()
    try:
        yield
    finally:
        _restore(states)


class GeneratorStates(NamedTuple):
    """States of the global generators, to see whether something has drawn from them.

    Python's and NumPy's are as in memory: their own functions take as long for a state as a small
    batch takes to load.
    """

    python: bytes
    numpy: bytes
    cpu: bytes

    @classmethod
    def now(cls) -> GeneratorStates:
        """Yield the present ones."""
        import ctypes

        import numpy as np
        import torch

        # https://github.com/python/cpython/blob/main/Modules/_randommodule.c: RandomObject
        python = id(random._inst) + object.__basicsize__
        twister: Any = np.random.mtrand._rand._bit_generator
        size = _TWISTER_KEY + ctypes.sizeof(ctypes.c_int)
        return cls(
            ctypes.string_at(python, size),
            ctypes.string_at(twister.ctypes.state_address, size),
            torch.get_rng_state().numpy().tobytes(),
        )

    def restore(self) -> None:
        """Restore them, but for a normal number that a generator may keep for its next call."""
        import numpy as np
        import torch

        # Python has the position before the key, NumPy after it.
        position, *words = np.frombuffer(self.python, np.uint32).tolist()
        random.setstate((3, (*words, position), None))
        *words, position = np.frombuffer(self.numpy, np.uint32).tolist()
        np.random.set_state(("MT19937", np.array(words, np.uint32), position, 0, 0.0))
        torch.set_rng_state(torch.frombuffer(bytearray(self.cpu), dtype=torch.uint8))


def _states() -> tuple[Any, Any, Any]:
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    import numpy as np
    import torch

    python, numpy, cpu = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


class RankDraws:
    """The random numbers that a rank draws in an own loop, from ``ctx.prepare`` on.

    Rank 0 draws what a run on one rank draws. The others would draw the same numbers, for other
    samples: augmentations and dropout masks would repeat. So their generators are seeded by the
    run's seed and the rank, and anew by the loader and its epoch at each pass over a loader, so
    that a resumed run draws what an uninterrupted one draws. Workers of loaders take their seeds
    from torch's generator.

    Args:
        ctx: the run's context.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._loaders = 0
        self._passes: Counter[tuple[object, ...]] = Counter()
        recorded = ctx.is_main and ctx.world_size > 1 and ctx.records_inexact
        self._log = DrawLog(ctx.paths.inexact) if recorded else None

    def prepared(self, models: Iterable[nn.Module]) -> None:
        """Seed this rank's generators after models are prepared: they are equal on all ranks."""
        for model in models:
            self._seed("prepare")
            if self._log is not None:
                self._log.add_layers(model)

    def add_loader(self) -> LoaderDraws:
        """Return the random numbers of a further loader."""
        self._ctx.divides_samples()
        self._loaders += 1
        return LoaderDraws(self._ctx, self, self._loaders)

    def begin_pass(self, loader: int, epoch: int) -> None:
        """Seed this rank's generators for a pass over a loader."""
        self._seed("loader", loader, epoch)

    def close(self) -> None:
        """Record which generators have drawn, for ``nb.verify.parity``."""
        if self._log is not None:
            self._log.end()

    def watched(self, init: Callable[[int], object] | None) -> Callable[[int], object] | None:
        """Return a loader's ``worker_init_fn``, that records the draws of the worker, too."""
        return init if self._log is None else _WatchedInit(self._ctx.paths.inexact, init)

    def count(self, *parts: object) -> int:
        """How often this was called with ``parts`` before."""
        self._passes[parts] += 1
        return self._passes[parts] - 1

    def _seed(self, *parts: object) -> None:
        ctx = self._ctx
        if self._log is not None:
            self._log.end()
        if not ctx.is_main:
            # A loop over next(iter(loader)) begins many passes over one epoch.
            seed_rank(ctx.device, ctx.seed, *parts, self.count(*parts), ctx.rank)
        if self._log is not None:
            self._log.begin()


class LoaderDraws:
    """The random numbers of the passes over one loader.

    Args:
        ctx: the run's context.
        draws: those of its rank.
        number: the loader's, from 1.
    """

    def __init__(self, ctx: RunContext, draws: RankDraws, number: int) -> None:
        self._ctx = ctx
        self._draws = draws
        self._number = number

    def begin_pass(self, epoch: int) -> None:
        """Seed this rank's generators for a pass over the loader."""
        self._draws.begin_pass(self._number, epoch)

    def in_common(self, batches: Iterable[Batch], epoch: int) -> Iterator[Batch]:
        """Iterate over a stream, of which each rank takes its slices; all ranks draw the same.

        Seeded like the order of a shuffled loader, on one rank, too.
        """
        parts = ("stream", self._number, epoch)
        rank_states = _states()
        seed_generators(self._ctx.seed, *parts, self._draws.count(*parts))
        try:
            iterator = iter(batches)
        finally:
            common = _states()
            _restore(rank_states)
        while True:
            rank_states = _states()
            _restore(common)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                common = _states()
                _restore(rank_states)
            yield batch


_GENERATORS = ("Python's random", "NumPy's generator", "torch's generator")
_DRAWN = "drawn from in the loop: different numbers on every rank"


class DrawLog:
    """Records which global generators of this process draw; one per process.

    Args:
        path: the file of :func:`record_inexact`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: set[str] = set()
        self._before: list[set[bytes]] = []

    def begin(self) -> None:
        """Begin to watch the generators as they are."""
        import torch

        self._before = [{state} for state in _digests()]
        # A DataLoader draws one number for its workers from torch's generator.
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        self._before[-1].add(generator.get_state().numpy().tobytes())

    def end(self) -> None:
        """Record the generators that have drawn since."""
        if not self._before:
            return
        for name, before, after in zip(_GENERATORS, self._before, _digests(), strict=True):
            if after not in before:
                self._add({name: _DRAWN})

    def add_layers(self, model: nn.Module) -> None:
        """Record the layers of a model that depend on the ranks."""
        # By its name: training may import what this module must not.
        self._add(resolve_name("nbtoolkit.training.model:inexact_layers")(model))

    def _add(self, reasons: Mapping[str, str]) -> None:
        # A loop over next(iter(loader)) begins many passes, each of which may draw.
        new = {name: reason for name, reason in reasons.items() if name not in self._names}
        record_inexact(self._path, new)
        self._names.update(new)


class _WatchedInit:
    """A ``worker_init_fn`` that records, at the worker's end, which generators have drawn."""

    def __init__(self, path: Path, init: Callable[[int], object] | None) -> None:
        self._path = path
        self._init = init

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        log = DrawLog(self._path)
        log.begin()
        Finalize(None, log.end, exitpriority=0)


def record_inexact(path: Path, reasons: Mapping[str, str]) -> None:
    """Append layers and generators whose results depend on the ranks to a file, a line for each.

    Args:
        path: the file; processes of a rank may write to it at the same time.
        reasons: name -> reason.
    """
    with path.open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in reasons.items())


def read_inexact(paths: RunPaths) -> dict[str, str]:
    """Read the layers and generators of :func:`record_inexact`, with their reasons."""
    with suppress(FileNotFoundError):
        return dict(json.loads(line) for line in paths.inexact.read_text().splitlines())
    return {}


def _digests() -> tuple[bytes, ...]:
    python, (_, keys, *numpy), cpu = _states()
    return repr(python).encode(), keys.tobytes() + repr(numpy).encode(), cpu.numpy().tobytes()
