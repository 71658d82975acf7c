"""No file in an output folder stops or blocks packing; skipped files are named."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

import nbtoolkit as nb

SECONDS = 120.0  # of a pack; the longest waits 20 s for a locked database
QUIET = {"tracking.mlflow": False, "runtime.pack": False}
DAMAGED = b"SQLite format 3\0" + bytes(range(256)) * 40


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    return {"loss": 0.5}


def until_told(config: nb.Config, ctx: nb.RunContext) -> None:
    step = 0
    while True:
        ctx.report({"step": step}, step=(step := step + 1))


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """An output folder with two runs."""
    folder = tmp_path / "outputs"
    config = nb.load_config(env=None, overrides={**QUIET, "runtime.output_dir": str(folder)})
    for name in ("one", "two"):
        nb.launch(train, config, name=name, display="off", start="inline", resume="never")
    return folder


def folder_of(outputs: Path, name: str) -> Path:
    (found,) = outputs.glob(f"*-{name}-*")
    return found


PACK = """
import json, sys, nbtoolkit as nb
packed = nb.pack(sys.argv[1], source=sys.argv[2])
print(json.dumps([packed.left_out, repr(packed), packed.runs]))
"""


def packed(outputs: Path, *before: str) -> tuple[str, set[str]]:
    """What a process that packs says of what is left out, and the bundle's members."""
    bundle = outputs.parent / "x.bundle"
    words = [*before, sys.executable, "-c", PACK, str(bundle), str(outputs)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    left_out, shown, runs = json.loads(done.stdout)
    assert len(runs) == 2
    assert all(text in shown for text in left_out)
    with tarfile.open(bundle) as tar:
        members = set(tar.getnames())
    (outputs.parent / "second").mkdir(exist_ok=True)
    assert len(nb.unpack(bundle, into=outputs.parent / "second").new) == 2
    return " ".join(left_out), members


def test_what_is_no_plain_file_is_left_out_and_named(outputs: Path, tmp_path: Path) -> None:
    run = folder_of(outputs, "one")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key.txt").write_text("outside")
    for place in (run, run / "plots", outputs):
        place.mkdir(exist_ok=True)
        os.mkfifo(place / "pipe")
        os.mkfifo(place / "pipe.json")
        with closing(socket.socket(socket.AF_UNIX)) as one:
            before = os.getcwd()
            os.chdir(place)  # the path of a socket has no room for a long folder
            try:
                one.bind("talk.sock")
            finally:
                os.chdir(before)
        (place / "link.txt").symlink_to(tmp_path / "secret/key.txt")
        (place / "folder").symlink_to(tmp_path / "secret")
        (place / "broken").symlink_to(tmp_path / "nowhere")
    left_out, members = packed(outputs)
    for place in (f"{run.name}/", f"{run.name}/plots/", ""):
        for name in ("pipe", "pipe.json", "talk.sock", "link.txt", "folder", "broken"):
            assert f"{place}{name}" in left_out
    assert not any(name.endswith(("pipe", ".sock", "link.txt", "key.txt")) for name in members)


@pytest.mark.parametrize("name", ["owner.lock", "config.yaml", "tracking.json", "error.pkl"])
def test_a_fifo_in_the_place_of_a_record_is_not_waited_for(outputs: Path, name: str) -> None:
    place = folder_of(outputs, "one") / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    packed(outputs)


def test_what_cannot_be_read_is_left_out_and_named(outputs: Path) -> None:
    without = []
    if os.getuid() == 0:  # who may read everything: packed without that right
        if (setpriv := shutil.which("setpriv")) is None:
            pytest.skip("needs setpriv to take root's rights away")
        without = [setpriv, "--bounding-set=-all", "--inh-caps=-all"]
    run = folder_of(outputs, "one")
    (run / "closed").mkdir()
    (run / "closed/inside.txt").write_text("x")
    for name in ("config.yaml", "large.npy", "study.jsonl", "values.pkl"):
        (run / name).write_bytes(DAMAGED)
        (run / name).chmod(0)
    (run / "closed").chmod(0)
    try:
        left_out, members = packed(outputs, *without)
    finally:
        (run / "closed").chmod(0o700)
    for name in ("config.yaml", "large.npy", "study.jsonl", "values.pkl", "closed"):
        assert f"{run.name}/{name}" in left_out
    assert "cannot be read" in left_out
    assert f"{run.name}/events.jsonl" in members


def test_databases_are_left_out_and_that_of_mlflow_without_a_word(outputs: Path) -> None:
    run = folder_of(outputs, "one")
    for place in (run / "study.db", outputs / "mlflow.db", outputs / "mlflow.db-wal"):
        place.write_bytes(DAMAGED)
    (outputs / "mlartifacts/1").mkdir(parents=True)
    (outputs / "mlartifacts/1/config.yaml").write_text("{}")
    left_out, members = packed(outputs)
    assert f"{run.name}/study.db" in left_out
    assert "not a kind of file that a bundle may hold" in left_out
    assert "mlflow" not in left_out
    assert not any(".db" in name or "mlartifacts" in name for name in members)


@pytest.mark.parametrize(
    "end",
    [
        '{"type": "ended", "status": "comp',
        "[3]",
        '{"t": 2, "type": "ended", "status": "completed", "summary": {"front": [[1]]}}\n',
        '{"t": 2, "type": "ended", "status": "completed", "summary": {"best_folder": 7}}\n',
        "\udcff\0",
        '{"type": "trial"}\n[1]\n{}\n',
    ],
)
def test_damaged_records_of_another_run_do_not_stop_a_pack(outputs: Path, end: str) -> None:
    run = folder_of(outputs, "one")
    text = '{"t": 1, "type": "run", "search": "sweep"}\n' + end
    (run / "events.jsonl").write_text(text, errors="surrogateescape")
    step = run / "checkpoints/step-000000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text('{"format": "nbtoolkit checkpoint 1", "files": [1]}')
    _, members = packed(outputs)
    assert f"{run.name}/events.jsonl" in members


@pytest.mark.parametrize(
    "name",
    [
        "model-000000003.weights.h5",
        "estimator.skops",
        "last.json",
        "checkpoint-5/model.safetensors",
        "checkpoint-5/rng_state.pth",
    ],
)
def test_checkpoints_of_integrations_are_carried(outputs: Path, name: str) -> None:
    run = folder_of(outputs, "one")
    file = run / "checkpoints" / name
    file.parent.mkdir(parents=True)
    file.write_text("x")
    _, members = packed(outputs)
    assert f"{run.name}/checkpoints/{name}" in members


CREDENTIALS = (
    *("kaggle.json", ".env", ".env.local", "server.pem", "id_ed25519", "token", "hf_token.txt"),
    *("api-token.json", "credentials.json", ".netrc", "private.key"),
)


def test_credentials_are_left_out_and_named(outputs: Path) -> None:
    run = folder_of(outputs, "one")
    (run / "export").mkdir()
    for place in (run, run / "export", outputs):
        for name in CREDENTIALS:
            (place / name).write_text("secret")
    for name in ("tokenizer.json", "tokens.txt", "monkey.json", "keys.npy"):
        (run / "export" / name).write_text("of the model")
    left_out, members = packed(outputs)
    for place in (f"{run.name}/", f"{run.name}/export/", ""):
        for name in CREDENTIALS:
            assert f"{place}{name}" in left_out
            assert f"{place}{name}" not in members
    for name in ("tokenizer.json", "tokens.txt", "monkey.json", "keys.npy"):
        assert f"{run.name}/export/{name}" in members


def test_wheels_and_files_of_no_run_stay_out(outputs: Path) -> None:
    wheels = outputs / "kaggle-wheels"
    wheels.mkdir()
    for name in ("nbtoolkit-0.2-py3-none-any.whl", "dataset-metadata.json"):
        (wheels / name).write_text("x")
    (outputs / "train.py").write_text("x")
    (outputs / "notes.txt").write_text("x")
    left_out, members = packed(outputs)
    for name in ("kaggle-wheels/nbtoolkit-0.2-py3-none-any.whl", "train.py", "notes.txt"):
        assert name in left_out
        assert f"{name}" not in members


@pytest.mark.parametrize("many", [60])
def test_many_names_of_one_reason_are_counted(outputs: Path, many: int) -> None:
    for number in range(many):
        (outputs / f"{number:02}.txt").write_text("x")
    left_out, _ = packed(outputs)
    assert "49.txt and 10 more (not in a run folder)" in left_out


@pytest.mark.timeout(120)
def test_a_launch_at_its_deadline_packs_whatever_lies_beside_it(
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    other = folder_of(outputs, "one")
    with (other / "events.jsonl").open("a") as events:
        events.write('{"type": "ended", "status": "comp')
    (other / "odd\udcff\n.txt").write_text("x")
    (other / "study.db").write_bytes(DAMAGED)
    (other / "kaggle.json").write_text("x")
    os.mkfifo(other / "pipe")
    short = {
        **QUIET,
        "runtime.time_budget": 0.2,
        "runtime.pack": True,
        "runtime.output_dir": "outputs",
    }
    ended = nb.launch(until_told, nb.load_config(env=None, overrides=short), start="inline")
    assert ended.status == "deadline"
    told = capsys.readouterr().out
    assert "packed for the next session: PackResult(3 runs, " in told
    assert all(f"{other.name}/{name}" in told for name in ("study.db", "kaggle.json", "pipe"))
    (bundle,) = tmp_path.glob("*.bundle")
    done = nb.unpack(bundle, into=tmp_path / "second")
    assert len(done.new) == 3
    assert (tmp_path / "second" / other.name / "odd\udcff\n.txt").exists()
