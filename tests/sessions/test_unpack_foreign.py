"""A bundle from somebody else writes only run folders below the output folder."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels import SECONDS

import nbtoolkit as nb
from nbtoolkit.errors import BundleError
from nbtoolkit.sessions.bundle import END, FORMAT

QUIET = {"tracking.mlflow": False, "runtime.pack": False}


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """A run that exports what notebooks export."""
    for name in ("predictions.csv", "model.onnx", "model.pth", "model.py"):
        (ctx.paths.folder / name).write_text("exported")
    return {"loss": 0.5}


class Harm:
    """A pickle that runs a command where it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle as another user packs it."""
    folder = tmp_path_factory.mktemp("theirs")
    config = nb.load_config(
        env=None, overrides={**QUIET, "runtime.output_dir": str(folder / "outputs")}
    )
    nb.launch(train, config, name="theirs", display="off")
    executed = folder / "outputs/20260101T000000-eda-0000.ipynb"
    executed.write_text("{}")
    executed.with_suffix(".run.json").write_text("{}")
    executed.with_suffix(".html").write_text("<p>")
    return nb.pack(folder, source=folder / "outputs").path


def forged(bundle: Path, to: Path, files: dict[str, bytes | str], **changed: float) -> Path:
    """The same bundle with more files, newer than any here, and another time of packing."""
    with tarfile.open(bundle) as tar:
        comment = tar.pax_headers["comment"]
        members = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    if "created" in changed:
        comment = f"{FORMAT}{changed['created']}"
    last = members.pop(END)
    more = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w", pax_headers={"comment": comment}) as tar:
        for name, data in {**members, **more, END: last}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 2**40
            tar.addfile(info, io.BytesIO(data))
    return to


def seen(folder: Path) -> set[str]:
    """All files below a folder, without those that unpack keeps its own records in."""
    files = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    names = {path.relative_to(folder).as_posix() for path in files}
    return {name for name in names if not name.endswith(".lock")}


SESSION = """
import json, nbtoolkit as nb
print(json.dumps(nb.unpack('theirs.bundle').notes))
import numpy
print(numpy.__file__)
"""


def test_a_bundle_writes_only_run_folders_below_the_output_folder(
    genuine: Path, tmp_path: Path
) -> None:
    run = run_in(genuine)
    evil = {
        "numpy/__init__.py": "raise SystemExit('imported')",
        ".ssh/authorized_keys": "ssh-ed25519 AAAA",
        f"{run}/numpy/__init__.py": "raise SystemExit('imported')",
        f"{run}/.ipython/startup.ipy": "x",
        f"{run}/lib.so": "x",
        f"{run}/hook.pth": "x",
        f"{run}/go.sh": "x",
        f"{run}/plots/curve.svg": "<svg/>",
        "sitecustomize.py": "x",
        "settings.yaml": "x",
    }
    home = tmp_path / "session"
    forged(genuine, home / "theirs.bundle", evil)
    done = subprocess.run(
        [sys.executable, "-c", SESSION], cwd=home, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    notes, numpy = done.stdout.splitlines()
    assert "site-packages" in numpy
    written = seen(home) - {"theirs.bundle"}
    assert {name.split("/")[0] for name in written} == {"outputs"}
    assert f"outputs/{run}/plots/curve.svg" in written
    assert not any(name.endswith((".py", ".so", ".pth", ".sh", ".ipy")) for name in written)
    assert not (home / "outputs/settings.yaml").exists()
    for name in evil.keys() - {f"{run}/plots/curve.svg"}:
        assert name in notes


def run_in(bundle: Path) -> str:
    with tarfile.open(bundle) as tar:
        return next(name.split("/")[0] for name in tar.getnames() if "/events.jsonl" in name)


def test_pickled_code_is_left_out_unless_the_user_says_whose_bundle_it_is(
    genuine: Path, tmp_path: Path
) -> None:
    run = run_in(genuine)
    harm = Harm(f"touch {tmp_path}/harmed")
    zipped, nested = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.rand(2), "hook": harm}, zipped)
    torch.save({"hook": harm}, nested, _use_new_zipfile_serialization=False)
    plain = {"loss": 0.5, "predictions": np.arange(5), "labels": torch.rand(5), "names": {"a"}}
    evil = {
        f"{run}/values/0.pkl": pickle.dumps(harm),
        f"{run}/values/1.pkl": pickle.dumps(Loader(nested.getvalue())),
        f"{run}/values/2.pkl": pickle.dumps(plain)[:-9],
        f"{run}/values/3.pkl": pickle.dumps(harm) + zip_of_plain_data(),
        f"{run}/values/4.pkl": pickle.dumps(torch.nn.Linear(1, 1)),
        f"{run}/checkpoints/last.pt": zipped.getvalue(),
        f"{run}/checkpoints/older.pt": nested.getvalue(),
        f"{run}/predictor.pkl": pickle.dumps(harm),
    }
    fine = {f"{run}/values/5.pkl": pickle.dumps(plain), f"{run}/weights.pt": zip_of_plain_data()}
    bundle = forged(genuine, tmp_path / "theirs.bundle", {**evil, **fine})
    done = nb.unpack(bundle, into=tmp_path / "mine")
    here = seen(tmp_path / "mine")
    assert not evil.keys() & here
    assert fine.keys() <= here
    (note,) = [note for note in done.notes if "a pickle of code" in note]
    assert all(name in note for name in evil)
    assert "trust=True" in note
    folder = nb.unpack(tmp_path / "mine", into=tmp_path / "copied")
    assert folder.new == (run,)
    assert evil.keys() <= seen(nb.unpack(bundle, into=tmp_path / "own", trust=True).folder)
    assert not (tmp_path / "harmed").exists()


class Loader:
    """A tensor's storage that torch loads without any restriction."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.data,)


def zip_of_plain_data() -> bytes:
    file = io.BytesIO()
    torch.save({"weight": torch.rand(2), "step": 3}, file)
    return file.getvalue()


def test_what_a_run_wrote_stays_and_code_is_named(genuine: Path, tmp_path: Path) -> None:
    done = nb.unpack(genuine, into=tmp_path / "mine")
    (run,) = done.new
    here = seen(tmp_path / "mine")
    assert {f"{run}/predictions.csv", f"{run}/model.onnx"} <= here
    assert {f"20260101T000000-eda-0000{end}" for end in (".ipynb", ".run.json", ".html")} <= here
    assert not any(name.endswith((".pth", ".py")) for name in here)
    assert any("model.pth" in note and "model.py" in note for note in done.notes)


def test_the_users_own_configuration_says_where_it_is_written(
    genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = forged(genuine, tmp_path / "theirs.bundle", {})
    config = nb.load_config(env=None, overrides={"runtime.output_dir": str(tmp_path / "mine")})
    assert nb.unpack(bundle, config=config).folder == tmp_path / "mine"
    assert nb.unpack(bundle, config={"runtime.output_dir": "dict"}).folder == tmp_path / "dict"
    assert nb.unpack(bundle, config=config, into="named").folder == tmp_path / "named"


@pytest.mark.parametrize("days", [1, 365])
def test_a_bundle_dated_in_the_future_is_refused_and_not_preferred(
    genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    later = forged(genuine, tmp_path / "later.bundle", {}, created=time.time() + 86400 * days)
    told = rf"later\.bundle is dated in the future, by {days} days\n  Allowed: (?s:.*)Do now:  set"
    with pytest.raises(BundleError, match=told):
        nb.unpack(later, into=tmp_path / "mine")
    real = forged(genuine, tmp_path / "real.bundle", {})
    monkeypatch.chdir(tmp_path)
    assert nb.unpack(into=tmp_path / "mine").bundle == real


@pytest.mark.parametrize(
    ("comment", "told"),
    [
        ("", "its comment does not begin with 'nbtoolkit bundle 3"),
        ("nbtoolkit bundle 9, packed at 1.0", "its comment does not begin with"),
        (f"{FORMAT}now", "it has no time of packing"),
        (f"{FORMAT}nan", "is dated in the future|it has no time"),
    ],
)
def test_a_bundle_of_another_form_is_refused(
    genuine: Path, tmp_path: Path, comment: str, told: str
) -> None:
    bundle = tmp_path / "x.bundle"
    with (
        tarfile.open(genuine) as tar,
        tarfile.open(bundle, "w", pax_headers={"comment": comment}) as copy,
    ):
        for member in tar:
            copy.addfile(member, tar.extractfile(member))
    with pytest.raises(BundleError, match=told):
        nb.unpack(bundle, into=tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("headers", [{"mtime": "nan"}, {"mtime": "inf"}, {"path": "a/\0.json"}])
def test_members_with_odd_headers_are_refused(
    genuine: Path, tmp_path: Path, headers: dict[str, str]
) -> None:
    bundle = tmp_path / "x.bundle"
    with (
        tarfile.open(genuine) as tar,
        tarfile.open(bundle, "w", pax_headers=tar.pax_headers) as copy,
    ):
        for member in tar:
            if member.name.endswith("predictions.csv"):
                member.pax_headers = headers
            copy.addfile(member, tar.extractfile(member))
    with pytest.raises(BundleError, match=r"is damaged: |never writes"):
        nb.unpack(bundle, into=tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_what_is_here_under_the_name_of_a_run_or_a_pipeline_stays(
    genuine: Path, tmp_path: Path
) -> None:
    """Also with a second bundle, when the first one has left its notebooks and runs there."""
    mine = tmp_path / "mine"
    for name in ("src/main.txt", "config/train.yaml", "work.ipynb", "elsewhere/x"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
    (tmp_path / "outside").mkdir()
    (mine / "linked").symlink_to(tmp_path / "outside")
    record = {"config.yaml": "{}", "events.jsonl": '{"t": 1, "type": "run"}\n'}
    evil = {f"src/{name}": text for name, text in record.items()}
    evil |= {f"linked/run/{name}": text for name, text in record.items()}
    evil |= {f"config/run/{name}": text for name, text in record.items()}
    evil |= {"config/train.yaml": "theirs", "config/steps/a.run.json": "{}", "top.yaml": "theirs"}
    evil |= {"work.ipynb": "theirs", "work.run.json": "{}", "steps/a.run.json": "{}"}
    evil |= {"config/pipeline.lock": "", "pipeline.lock": ""}
    for name in ("one", "two"):
        bundle = forged(genuine, tmp_path / f"{name}.bundle", evil, created=time.time() + 1800)
        notes = " ".join(nb.unpack(bundle, into=mine).notes)
        for file in ("src/main.txt", "config/train.yaml", "work.ipynb", "elsewhere/x"):
            assert (mine / file).read_text() == "mine"
        assert list((tmp_path / "outside").iterdir()) == []
        assert not (mine / "top.yaml").exists()
        assert not (mine / "config/steps").exists()
        assert all(name in notes for name in ("src/config.yaml", "config/train.yaml", "top.yaml"))


def test_a_file_of_the_future_does_not_beat_later_ones(genuine: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    nb.unpack(genuine, into=mine)
    future = time.time_ns() + 10**18
    record = mine / "20260101T000000-eda-0000.run.json"
    assert record.stat().st_mtime_ns < time.time_ns()
    os.utime(record, ns=(future, future))
    again = nb.pack(tmp_path, source=mine)
    nb.unpack(again.path, into=tmp_path / "third")
    copied = tmp_path / "third" / record.name
    assert copied.stat().st_mtime_ns <= time.time_ns()
