"""A bundle from somebody else writes only run folders below the output folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from kernels import SECONDS

import nbtoolkit as nb
from nbtoolkit.errors import BundleError
from nbtoolkit.sessions.bundle import FILES, HEADER, MANIFEST, digest

QUIET = {"tracking.mlflow": False, "runtime.pack": False}


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """A run that exports what notebooks export."""
    for name in ("predictions.csv", "model.onnx", "model.pth", "model.py"):
        (ctx.paths.folder / name).write_text("exported")
    return {"loss": 0.5}


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


def forged(bundle: Path, to: Path, files: dict[str, str], **header: Any) -> Path:
    """The same bundle with more files and other words in its header: whole by its digests."""
    with tarfile.open(bundle) as tar:
        members = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    about = {**json.loads(members.pop(HEADER)), **header}
    listed = json.loads(members.pop(MANIFEST).partition(b"\n")[2])
    for name, text in files.items():
        members[FILES + name] = text.encode()
        listed[name] = [len(text.encode()), 2**62, digest(text.encode())]  # newer than any here
    raw = json.dumps(listed).encode()
    manifest = digest(raw).encode() + b"\n" + raw
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w") as tar:
        for name, data in (
            (HEADER, json.dumps(about).encode()),
            *members.items(),
            (MANIFEST, manifest),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return to


def seen(folder: Path) -> set[str]:
    """All files below a folder, without those that unpack keeps its own records in."""
    files = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    names = {path.relative_to(folder).as_posix() for path in files}
    return {name for name in names if not name.endswith((".nbtoolkit-bundles.json", ".lock"))}


SESSION = """
import json, nbtoolkit as nb
print(json.dumps(nb.unpack('theirs.bundle').notes))
import numpy
print(numpy.__file__)
"""


@pytest.mark.parametrize("place", [".", "numpy/..", "config", None])
def test_a_bundle_does_not_say_where_it_is_written(
    genuine: Path, tmp_path: Path, place: str | None
) -> None:
    run = next(one["folder"] for one in json.loads(header_of(genuine))["runs"])
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
    forged(genuine, home / "theirs.bundle", evil, place=place)
    (home / "config").mkdir()
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


def header_of(bundle: Path) -> str:
    with tarfile.open(bundle) as tar:
        return tar.extractfile(HEADER).read().decode()  # type: ignore[union-attr]


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
    bundle = forged(genuine, tmp_path / "theirs.bundle", {}, place="theirs")
    config = nb.load_config(env=None, overrides={"runtime.output_dir": str(tmp_path / "mine")})
    assert nb.unpack(bundle, config=config).folder == tmp_path / "mine"
    assert nb.unpack(bundle, config={"runtime.output_dir": "dict"}).folder == tmp_path / "dict"
    assert nb.unpack(bundle, config=config, into="named").folder == tmp_path / "named"
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("days", [1, 365])
def test_a_bundle_dated_in_the_future_is_refused_and_not_preferred(
    genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    later = forged(
        genuine, tmp_path / "later.bundle", {}, created=time.time() + 86400 * days, source="/later"
    )
    told = rf"later\.bundle is dated in the future, by {days} days\n  Allowed: (?s:.*)Do now:  set"
    with pytest.raises(BundleError, match=told):
        nb.unpack(later, into=tmp_path / "mine")
    real = forged(genuine, tmp_path / "real.bundle", {})
    monkeypatch.chdir(tmp_path)
    assert nb.unpack(into=tmp_path / "mine").bundle == real


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"more": 1}, "more: Extra inputs are not permitted"),
        ({"created": "now"}, "created: Input should be a valid number"),
        ({"created": float("nan")}, "created: Input should be"),
        ({"created": -1.0}, "created: Input should be greater than 0"),
        (
            {"runs": [{"folder": "a", "status": "x", "alive": False, "run": "rm"}]},
            r"runs\.0\.run: ",
        ),
        ({"runs": {"folder": "a"}}, "runs: Input should be a valid"),
        ({"left_out": [3]}, r"left_out\.0: Input should be a valid string"),
        ({"source": None}, "source: Input should be a valid string"),
        ({"format": "nbtoolkit bundle 9"}, "format: Input should be 'nbtoolkit bundle 2'"),
    ],
)
def test_a_header_of_another_form_is_refused(
    genuine: Path, tmp_path: Path, header: dict[str, Any], told: str
) -> None:
    bundle = forged(genuine, tmp_path / "x.bundle", {}, **header)
    with pytest.raises(BundleError, match=rf"is not an nbtoolkit bundle: {told}(?s:.*)Allowed: "):
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
    runs = [
        {"folder": folder, "status": "completed", "alive": False}
        for folder in ("src", "linked/run", "config/run")
    ]
    for name in ("one", "two"):
        bundle = forged(
            genuine, tmp_path / f"{name}.bundle", evil, runs=runs, created=time.time() + 1800
        )
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
