"""Damaged files of a run, a sweep and a cross-validation: each call works or says what is wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from records import first_of

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError, NbtoolkitError, WorkerError

KINDS = ("run", "failed", "sweep", "cv")
SPACE = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1, "log": True}}
SWEEP_CONFIG = {"study": {"name": "rates", "metric": "score", "sampler": "random"}, "space": SPACE}


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
        return nb.sweep(train, config, SWEEP_CONFIG, n_trials=2 + more, **options)
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


def _other_types(value: Any, kind: type | tuple[type, ...], new: Any) -> Any:
    """A JSON value in which each value of this type below the top is another one."""
    if isinstance(value, dict):
        return {name: _other_types(part, kind, new) for name, part in value.items()}
    if isinstance(value, list):
        return [_other_types(part, kind, new) for part in value]
    return new if isinstance(value, kind) and not isinstance(value, bool) else value


def _retype(file: Path, kind: type | tuple[type, ...], new: Any) -> None:
    """Edit a JSON file, or each line of one, by hand; events keep their types."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    texts = []
    for line in lines:
        value = json.loads(line)
        changed = _other_types(value, kind, new)
        if isinstance(value, dict) and "type" in value:
            changed["type"] = value["type"]
        texts.append(json.dumps(changed) + "\n")
    file.write_text("".join(texts))


TYPES: dict[str, Callable[[Path], Any]] = {
    "text for numbers": lambda file: _retype(file, (int, float), "many"),
    "numbers for text": lambda file: _retype(file, str, 7),
    "lists for numbers": lambda file: _retype(file, (int, float), [7]),
}
"""Damage of files that are JSON."""

DAMAGE: dict[str, Callable[[Path], Any]] = {
    **TYPES,
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
    names = (
        "value",
        "values",
        "trials",
        "study",
        "best_config",
        "sweep_config",
        "scores",
        "mean",
        "oof",
    )
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
    nb.pack(folder.parent / "packed.bundle", source=folder.parent)


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
    whole: dict[str, Path],
    place: Path,
    kinds: tuple[str, ...] = tuple(DAMAGE),
    *,
    below: bool = True,
) -> Iterator[tuple[str, str, Path]]:
    """A damaged copy after the other: the kind of run, what was done, the folder."""
    number = itertools.count()
    for kind, folder in whole.items():
        for file in _files(folder):
            if not below and len(file.parts) > 1 and file.name != "0.pkl":
                continue
            for damage in kinds:
                if damage in TYPES and file.suffix not in (".json", ".jsonl"):
                    continue
                copy = place / str(next(number)) / folder.name
                shutil.copytree(folder, copy)
                DAMAGE[damage](copy / file)
                yield kind, f"{kind} {file} {damage}", copy
                shutil.rmtree(copy.parent, ignore_errors=True)


def test_a_few_damaged_files_are_named(whole: dict[str, Path], tmp_path: Path) -> None:
    """The short form of the next test: no processes, six kinds of damage."""
    few = {kind: whole[kind] for kind in ("run", "failed", "sweep")}
    damage = ("empty", "list", "folder", *TYPES)
    raw = [
        f"{name}, {what}: {error}"
        for _, what, folder in injected(few, tmp_path, damage, below=False)
        for name in ("attach", "result", "load_model")
        if (error := _raw(partial(CALLS[name], folder)))
    ]
    assert not raw, "\n".join(raw)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_every_damaged_file_is_named(whole: dict[str, Path], tmp_path: Path, kind: str) -> None:
    damaged = 0
    raw = []
    for _, what, folder in injected({kind: whole[kind]}, tmp_path):
        damaged += 1
        for name, call in CALLS.items():
            if error := _raw(partial(call, folder)):
                raw.append(f"{name}, {what}: {error}")
    assert damaged > 50
    assert not raw, "\n".join(raw)


def _resumed(kind: str, config: nb.Config, folder: Path) -> str:
    """The raw error of resuming a damaged run; empty: there is none."""
    there = config.with_overrides({"runtime.output_dir": str(folder.parent)})
    return _raw(partial(begin, kind, there, folder, 1))


def test_a_damaged_run_resumes_or_is_named(
    config: nb.Config, whole: dict[str, Path], tmp_path: Path
) -> None:
    few = {"run": whole["run"]}
    raw = [
        f"{what}: {error}"
        for kind, what, folder in injected(few, tmp_path, ("empty", "list", *TYPES), below=False)
        if (error := _resumed(kind, config, folder))
    ]
    assert not raw, "\n".join(raw)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_damaged_resumes_or_is_named(
    config: nb.Config, whole: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    # A sweep and folds start processes for each.
    damage = tuple(DAMAGE) if kind in ("run", "failed") else ("empty", "list", "folder", "missing")
    raw = [
        f"{what}: {error}"
        for _, what, folder in injected({kind: whole[kind]}, tmp_path, damage)
        if (error := _resumed(kind, config, folder))
    ]
    assert not raw, "\n".join(raw)


# --- what is still there is used ------------------------------------------------------------------


@pytest.fixture
def copied(whole: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies the folder of a kind."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(whole[kind], tmp_path / whole[kind].name))

    return copy


def test_the_error_has_three_parts(copied: Callable[[str], Path]) -> None:
    folder = copied("run")
    (folder / "values/0.pkl").write_bytes(b"")
    told = r"(?s)0.pkl cannot be read: .*\n  Allowed: an undamaged .*\n  Do now:  .*resumes"
    with pytest.raises(NbtoolkitError, match=told):
        _ = nb.attach(folder, display="off").result().value


def test_a_failed_run_whose_end_is_cut_resumes(
    config: nb.Config, copied: Callable[[str], Path]
) -> None:
    folder = copied("failed")
    events = folder / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-20])
    there = config.with_overrides({"runtime.output_dir": str(folder.parent)})
    with pytest.raises(Failed):
        begin("failed", there, "auto")
    assert first_of(folder).attempt == 2


def test_a_failure_whose_exception_is_lost_is_told_by_its_text(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("failed")
    (folder / "error.pkl").write_bytes(b"")
    with pytest.raises(WorkerError, match=r"(?s)Failed.*Traceback.*Do now:  read the traceback"):
        nb.attach(folder, display="off").result()


def test_an_older_checkpoint_that_is_whole_is_used(
    config: nb.Config, copied: Callable[[str], Path]
) -> None:
    folder = copied("run")
    begin("run", config.with_overrides({"runtime.output_dir": str(folder.parent)}), folder, 1)
    checkpoints = folder / "checkpoints"
    older, newest = sorted(checkpoints.glob("step-*"))
    shutil.rmtree(next(checkpoints.glob("best-*")))
    (newest / "model.pt").write_bytes(b"")
    model = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match=rf"skipped a damaged checkpoint, {newest.name}"):
        nb.load_model(folder, model)
    saved = torch.load(older / "model.pt", weights_only=True)
    assert any(torch.equal(model.weight, one) for one in saved.values() if one.shape == (1, 2))


def test_a_sweep_that_lost_its_trials_events_is_read_from_its_study(
    whole: dict[str, Path], copied: Callable[[str], Path]
) -> None:
    folder = copied("sweep")
    before = nb.attach(whole["sweep"], display="off").result()
    events = folder / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join([lines[0], lines[-1]]))
    after = nb.attach(folder, display="off").result()
    assert len(after.trials) == 2
    assert after.trials.equals(before.trials)


# --- YAML -----------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [LAUGHS, MERGES], ids=["aliases", "merges"])
def test_aliases_of_aliases_are_refused(tmp_path: Path, text: str) -> None:
    # the file is some hundred bytes, and 10^12 values
    file = tmp_path / "train.yaml"
    file.write_text(text)
    told = r"(?s)aliases expand to more than 100,000 values.*Allowed: .*Do now: "
    with pytest.raises(ConfigError, match=told):
        nb.load_config(file, env=None)


def test_aliases_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("model: &m {hidden: 3}\ndata: {one: *m, two: *m}\n")
    config = nb.load_config(file, env=None)
    assert config.to_dict()["data"] == {"one": {"hidden": 3}, "two": {"hidden": 3}}


@pytest.mark.parametrize("name", ["deep.yaml", "deep.json"])
def test_what_is_nested_too_deeply_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=f"{name}: not valid"):
        nb.load_config(file, env=None)
