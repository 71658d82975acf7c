"""Damaged files of a run, a sweep and a cross-validation: each call works or says what is wrong."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.errors import NbtoolkitError

KINDS = ("run", "failed", "sweep", "cv")
SPACE = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1, "log": True}}
WISHES = {"study": {"name": "rates", "metric": "score", "sampler": "random"}, "space": SPACE}


class Failed(Exception):
    """What the failing training raises."""


def train(config: Any, ctx: Any) -> dict[str, Any]:
    """A training of some milliseconds with all that a run keeps: fit's checkpoints and a value."""
    inputs = torch.linspace(-1, 1, 32).reshape(16, 2)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    nb.fit(ctx, config, torch.nn.Linear(2, 1), data, data, loss=torch.nn.functional.mse_loss)
    ctx.load()
    ctx.save({"weight": torch.ones(2)})
    return {"score": config.optim.lr, "predictions": [0, 1], "labels": [0, 1]}


def fails(config: Any, ctx: Any) -> None:
    """The same, and an error at the end."""
    train(config, ctx)
    raise Failed


def begin(kind: str, config: nb.Config, resume: Any, more: int = 0) -> Any:
    """Run one of the four, or resume it with ``more`` to do."""
    options: dict[str, Any] = {"resume": resume, "display": "off"}
    if kind == "sweep":
        return nb.sweep(train, config, WISHES, n_trials=2 + more, **options)
    if kind == "cv":
        return nb.cross_validate(train, config, nb.make_folds([0, 1] * 8, k=2), **options)
    function = fails if kind == "failed" else train
    config = config.with_overrides({"train.epochs": 2 + more})
    return nb.launch(function, config, processes=1, start="inline", **options)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> nb.Config:
    settings = {
        "tracking.mlflow": False,
        "train.batch_size": 8,
        "train.epochs": 2,
        "runtime.output_dir": str(tmp_path_factory.mktemp("outputs")),
    }
    return nb.load_config(env=None, overrides=settings)


@pytest.fixture(scope="module")
def whole(config: nb.Config) -> dict[str, Path]:
    """The folder of one of each kind that has ended."""
    folders: dict[str, Path] = {}
    parent = Path(config.runtime.output_dir)
    for kind in KINDS:
        with contextlib.suppress(Failed):
            begin(kind, config, "never")
        [folders[kind]] = set(parent.iterdir()) - {*folders.values(), parent / ".cache"}
    return folders


# --- damage ---------------------------------------------------------------------------------------


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def _unreadable(file: Path) -> None:
    """Reading fails for root, too: what lies at address 0 of this process cannot be read."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "truncated": _truncated,
    "garbage": lambda file: file.write_bytes(b"\x80\x00\xff{garbage" * 20),
    "list": lambda file: file.write_bytes(b'["of", "another", {"type": "trial"}]\n'),
    "unreadable": _unreadable,
    "folder": _folder,
    "missing": lambda file: file.unlink(),
}


# --- calls ----------------------------------------------------------------------------------------


def attach(folder: Path) -> None:
    handle = nb.attach(folder, display="off")
    list(handle.events())
    repr(handle)
    handle._repr_html_()


def result(folder: Path) -> None:
    found = nb.attach(folder, display="off").result()
    names = ("value", "values", "trials", "study", "best_config", "wishes", "scores", "mean", "oof")
    for name in ("table", *names, "__repr__", "_repr_html_"):
        try:
            one = getattr(found, name, None)
            if callable(one) and name.startswith("_"):
                one()
        except NbtoolkitError:
            continue


def load_model(folder: Path) -> None:
    nb.load_model(folder, torch.nn.Linear(2, 1))


def report(folder: Path) -> None:
    nb.report(folder, folder / "report.html")


def pack(folder: Path) -> None:
    nb.pack(folder.parent / "packed.nbrelay", source=folder.parent)


CALLS: dict[str, Callable[[Path], object]] = {
    "attach": attach,
    "result": result,
    "load_model": load_model,
    "pack": pack,
    "report": report,
}


def _files(folder: Path) -> list[Path]:
    """All files of a run that its own name does not repeat: of the trials and folds the first."""
    others = ("trials/0001", "folds/1", ".wal", ".shm")
    found = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file())
    return [file for file in found if not any(one in file.as_posix() for one in others)]


def _raw(call: Callable[[], object]) -> str:
    """The error of a call that is none of ours; empty: it works, or raises one of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except (NbtoolkitError, Failed):
            return ""
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)
            ours = [f"{f.filename[-40:]}:{f.lineno}" for f in last if "/nbtoolkit/" in f.filename]
            return f"{type(error).__name__}: {str(error)[:80]} at {ours[-1:]}"
    return ""


def injected(
    whole: dict[str, Path], place: Path, kinds: tuple[str, ...] = tuple(DAMAGE)
) -> Iterator[tuple[str, str, Path]]:
    """A damaged copy after the other: the kind of run, what was done, the folder."""
    number = itertools.count()
    for kind, folder in whole.items():
        for file in _files(folder):
            for damage in kinds:
                copy = place / str(next(number)) / folder.name
                shutil.copytree(folder, copy)
                DAMAGE[damage](copy / file)
                yield kind, f"{kind} {file} {damage}", copy
                shutil.rmtree(copy.parent, ignore_errors=True)
