"""Packing and unpacking: contents of a bundle, exclusions, refusals, existing runs."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch
from kernels import SECONDS
from limits import files_up_to

import nbtoolkit as nb
from nbtoolkit.environment.resources import free_space, read_size, size_text
from nbtoolkit.errors import BundleError, CheckpointError, ConfigError
from nbtoolkit.host import Host, HostKind
from nbtoolkit.launcher.options import Start
from nbtoolkit.run.paths import RunPaths, runs_in
from nbtoolkit.run.resume import lock_run
from nbtoolkit.sessions.bundle import DEFAULT_NAME, END, write_bundle
from nbtoolkit.sessions.contents import NEEDED, contents_of
from nbtoolkit.sessions.find_bundle import find_source
from nbtoolkit.sessions.pack import PackResult, pack_for_next_session

SMALL = {"train.epochs": 2, "train.batch_size": 512, "model.hidden": 16, "tracking.mlflow": False}


def train(config, ctx):
    """A few steps of fit, with nothing that each process would have to import but torch."""
    inputs = torch.rand(1797, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :4].argmax(dim=1)
    fitted, held_out = range(1500), range(1500, 1797)
    if ctx.fold is not None:
        fitted, held_out = ctx.fold.train_indices, ctx.fold.valid_indices
    hidden = config.model["hidden"]
    model = torch.nn.Sequential(
        torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 4)
    )
    return nb.fit(
        ctx,
        config,
        model,
        (inputs[fitted], targets[fitted]),
        (inputs[held_out], targets[held_out]),
        loss=torch.nn.functional.cross_entropy,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with a finished run, an unfinished one, a sweep and a cross-validation."""
    folder = tmp_path_factory.mktemp("made") / "outputs"
    config = nb.load_config(
        env=None, overrides={**SMALL, "runtime.output_dir": str(folder), "runtime.pack": False}
    )
    quiet = {"display": "off"}
    nb.launch(train, config, name="finished", **quiet)
    endless = config.with_overrides({"train.epochs": 100_000, "runtime.time_budget": 1.0})
    assert nb.launch(train, endless, name="unfinished", **quiet).status == "deadline"
    space = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1}}
    nb.sweep(train, config, space, n_trials=2, name="search", **quiet)
    folds = nb.make_folds([0, 1] * 898 + [0], k=2)
    nb.cross_validate(train, config, folds, name="folded", **quiet)
    plots = folder / "pipeline/plots"  # a pipeline's notebooks write to its folder
    plots.mkdir(parents=True)
    (folder / "pipeline/steps").mkdir()
    (folder / "pipeline/steps/first.run.json").write_text("{}")
    (plots / "curve.png").write_bytes(os.urandom(20_000))
    return folder


@pytest.fixture
def outputs(made: Path, tmp_path: Path) -> Path:
    """The same, for one test to change."""
    return Path(shutil.copytree(made, tmp_path / "first" / "outputs"))


@pytest.fixture
def bundle(outputs: Path, tmp_path: Path) -> Path:
    return nb.pack(tmp_path, source=outputs).path


def folder_of(outputs: Path, name: str) -> Path:
    (found,) = outputs.glob(f"*-{name}-*")
    return found


def names(bundle: Path) -> set[str]:
    """The files in a bundle, below the output folder, without the runs' ids and epochs."""
    with tarfile.open(bundle) as tar:
        found = tar.getnames()
    return {name.split("-", 1)[-1] if name[0] == "2" else name for name in found}


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("[!.]*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# --- what is in it --------------------------------------------------------------------------------


def test_a_bundle_holds_what_the_next_session_needs_and_the_best_weights(
    bundle: Path, outputs: Path
) -> None:
    kept, unfinished = names(bundle), folder_of(outputs, "unfinished")
    ends = {name.split("/", 1)[-1] for name in kept if "/" in name}
    assert {"config.yaml", "events.jsonl", "study.jsonl", "folds.json"} <= ends
    checkpoints = {(name.split("-")[0], name.split("/")[-2]) for name in kept if ".pt" in name}
    kinds = {(run, folder.split("-")[0]) for run, folder in checkpoints}
    runs = ("finished", "search", "folded")
    goes_on = {path.name.split("-")[0] for path in unfinished.glob("checkpoints/*-*")}
    assert kinds == {(run, "best") for run in runs} | {("unfinished", kind) for kind in goes_on}
    assert "step" in goes_on
    steps = {folder for run, folder in checkpoints if (run, folder[:4]) == ("unfinished", "step")}
    assert steps == {max(path.name for path in unfinished.glob("checkpoints/step-*"))}
    assert not any("owner" in name or name.endswith("-wal") for name in kept)


def test_any_tar_lists_it_without_a_word_and_its_last_member_says_it_is_whole(
    bundle: Path,
) -> None:
    tar = shutil.which("tar")
    assert tar is not None
    done = subprocess.run([tar, "-tf", bundle], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == (END, "")


def test_what_comes_out_is_what_went_in(bundle: Path, outputs: Path, tmp_path: Path) -> None:
    done = nb.unpack(bundle, into=tmp_path / "second")
    assert len(done.new) == 4
    there = tree(tmp_path / "second")
    before = tree(outputs)
    assert [name for name in there if there[name] != before[name]] == []
    assert nb.attach(folder_of(tmp_path / "second", "finished")).result().metrics


def test_results_of_other_paths_find_their_own_checkpoints(bundle: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    nb.unpack(bundle, into=second)
    shutil.rmtree(tmp_path / "first")
    for name in ("finished", "unfinished"):
        result = nb.attach(folder_of(second, name)).result()
        assert result.checkpoint is not None
        assert result.checkpoint.is_relative_to(second)
        assert (result.checkpoint / "model.pt").exists()


def test_a_file_of_many_blocks_comes_out_as_it_went_in(outputs: Path, tmp_path: Path) -> None:
    large = os.urandom(2**20) * 33 + b"end"
    (outputs / "pipeline/large.npy").write_bytes(large)
    packed = nb.pack(tmp_path, source=outputs)
    nb.unpack(packed.path, into=tmp_path / "second")
    assert (tmp_path / "second/pipeline/large.npy").read_bytes() == large


def test_a_file_that_became_shorter_while_it_was_packed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.bin", "b.bin", "c.bin"):
        (tmp_path / name).write_bytes(b"whole" * 10**6)
    files = [tmp_path / "a.bin", tmp_path / "b.bin", tmp_path / "c.bin"]
    add = tarfile.TarFile.addfile

    def addfile(tar: tarfile.TarFile, info: tarfile.TarInfo, file: IO[bytes]) -> None:
        if info.name == "b.bin":
            os.truncate(tmp_path / "b.bin", 10**6)
        add(tar, info, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", addfile)
    with (tmp_path / "x.tar").open("wb") as out:
        assert write_bundle(out, tmp_path, files, ()) == (2, ["b.bin"])
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames() == ["a.bin", "c.bin", END]
        assert tar.extractfile("c.bin").read() == b"whole" * 10**6  # type: ignore[union-attr]


def test_a_run_that_goes_on_is_packed_as_it_is_and_told(outputs: Path, tmp_path: Path) -> None:
    run = RunPaths(folder_of(outputs, "unfinished"))
    with run.events.open("a") as diary:
        diary.write('{"t": 1, "type": "metrics", "val')  # the supervisor is writing this line
    lock = lock_run(run)
    assert lock is not None
    packed = nb.pack(tmp_path, source=outputs)
    lock.release()
    (note,) = packed.notes
    assert run.run_id in note
    assert "not in the bundle" in note
    nb.unpack(packed.path, into=tmp_path / "second")
    copied = RunPaths(folder_of(tmp_path / "second", "unfinished")).events.read_bytes()
    assert copied.endswith(b"\n")
    assert run.events.read_bytes().startswith(copied)


# --- how large ------------------------------------------------------------------------------------


def test_what_is_left_out_first_is_what_matters_least(outputs: Path, tmp_path: Path) -> None:
    (folder_of(outputs, "finished") / "ranks/0/log.txt").write_bytes(os.urandom(60_000))
    contents = contents_of(outputs, outputs)
    everything, needed = sum(contents.sizes.values()), contents.sizes[NEEDED]
    assert contents.fit(everything) == {}
    assert list(contents.fit(everything - 1)) == ["weights of trials that did not win"]
    rest = [
        "output of ranks, TensorBoard and W&B files",
        "best checkpoints of finished runs",
    ]
    assert list(contents.fit(needed)) == rest
    assert contents.fit(0) == {}
    whole = nb.pack(tmp_path, source=outputs)
    assert whole.left_out == ()
    limit = whole.size - 30_000
    less = nb.pack(tmp_path, source=outputs, size_limit=limit)
    assert [text.split(",")[0] for text in less.left_out] == [
        "weights of trials that did not win",
        "output of ranks",
    ]
    assert f"size_limit is {size_text(limit)}" in less.left_out[0]
    assert less.size <= limit
    unpacked = nb.unpack(less.path, into=tmp_path / "second")
    assert any("packed without output of ranks" in note for note in unpacked.notes)
    log = folder_of(tmp_path / "second", "finished") / "ranks/0/log.txt"
    assert not log.exists()
    # the smaller one first, then the whole one: what was left out is filled in
    nb.pack(tmp_path, source=outputs)
    nb.unpack(less.path, into=tmp_path / "second")
    assert log.exists()


def test_what_unfinished_runs_go_on_from_must_fit(outputs: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"needs .* and has .*: size_limit is 50"):
        nb.pack(tmp_path, source=outputs, size_limit="50kB")
    assert list(tmp_path.glob("*.bundle*")) == []


@pytest.mark.parametrize(
    ("size", "count"), [(5, 5), ("15GB", 15 * 10**9), ("1.5 MiB", 1572864), ("7", 7), ("3kb", 3000)]
)
def test_sizes_are_read_as_people_write_them(size: int | str, count: int) -> None:
    assert read_size(size) == count


@pytest.mark.parametrize("size", ["much", "15 Gigs", -1, True, "-3MB"])
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(ConfigError, match=r"is not a size\n  Allowed: bytes, or a string with"):
        read_size(size)


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    assert free_space(tmp_path / "not/there") == shutil.disk_usage(tmp_path).free


# --- what cannot be written -----------------------------------------------------------------------


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=rf"there are no runs in {tmp_path}\n  Allowed"):
        nb.pack(tmp_path, source=tmp_path)
    with pytest.raises(BundleError, match=r"there is no output folder .*nowhere\n  Allowed"):
        nb.pack(tmp_path, source=tmp_path / "nowhere")


def test_a_name_that_is_no_bundles_is_refused(outputs: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"x\.zip is not named like a bundle\n(?s:.*)x\.bundle"):
        nb.pack(tmp_path / "x.zip", source=outputs)


def test_a_disk_that_fills_up_meanwhile_leaves_the_bundle_before(
    bundle: Path, outputs: Path, tmp_path: Path
) -> None:
    before = bundle.read_bytes()
    told = r"cannot be written: File too large\n(?s:.*)Do now:  free some space"
    with files_up_to(30_000), pytest.raises(BundleError, match=told):
        nb.pack(tmp_path, source=outputs)
    assert bundle.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [bundle.name]


def left_over(home: Path) -> list[Path]:
    return [path for path in home.glob("**/.n*") if path.suffix != ".json"]


KILLED = """
import resource, signal
import nbtoolkit as nb
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a file that grows too large ends the process
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
"""


@pytest.mark.parametrize(
    "call",
    [
        "nb.pack('.', source='first/outputs')",
        "nb.unpack('nbtoolkit-relay.bundle', into='second')",
    ],
)
def test_what_a_kill_leaves_is_removed_by_the_next_call(
    bundle: Path, outputs: Path, tmp_path: Path, call: str
) -> None:
    words = [sys.executable, "-c", KILLED + call]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    assert left_over(tmp_path) != []
    nb.unpack(bundle, into=tmp_path / "second")
    nb.pack(tmp_path, source=outputs)
    assert left_over(tmp_path) == []
    assert len(runs_in(tmp_path / "second")) == 4


IN_OWN_MOUNTS = """
import nbtoolkit as nb
for call in (
    lambda: nb.pack("disk", source="first/outputs"),
    lambda: nb.unpack("nbtoolkit-relay.bundle", into="disk/outputs"),
):
    try:
        call()
    except nb.errors.BundleError as error:
        print(error.what)
"""


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("ro", ["cannot be written: Read-only file", "cannot be unpacked into"]),
        ("size=100k", ["has 0.0 kB: ", "disk/outputs: No space left"]),
    ],
)
def test_a_disk_that_is_read_only_or_too_small_is_told(
    bundle: Path, tmp_path: Path, mode: str, told: list[str]
) -> None:
    unshare = [shutil.which("unshare") or "unshare", "-rm"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace (unshare -rm), which this machine does not allow")
    (tmp_path / "disk").mkdir()
    (tmp_path / "calls.py").write_text(IN_OWN_MOUNTS)
    mount = f"mount -t tmpfs -o {mode} tmpfs disk && exec {sys.executable} calls.py"
    words = [*unshare, "sh", "-c", mount]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(text in line for text, line in zip(told, lines, strict=True)), lines


WITHOUT_ROOM_IN_TMPDIR = """
import nbtoolkit as nb
packed = nb.pack(".", source="first/outputs")
print(packed.left_out, nb.unpack("first/outputs", into="second").files)
"""


def test_packing_needs_no_room_in_the_temporary_folder(outputs: Path, tmp_path: Path) -> None:
    unshare = [shutil.which("unshare") or "unshare", "-rm"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace (unshare -rm), which this machine does not allow")
    (outputs / "pipeline/large.npy").write_bytes(os.urandom(100_000))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "calls.py").write_text(WITHOUT_ROOM_IN_TMPDIR)
    mount = f"mount -t tmpfs -o size=16k tmpfs tiny && exec {sys.executable} calls.py"
    done = subprocess.run(
        [*unshare, "sh", "-c", mount],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tiny")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.startswith("() "), done.stdout + done.stderr
    assert "pipeline/large.npy" in names(tmp_path / DEFAULT_NAME)
    assert len(runs_in(tmp_path / "second")) == 4
    assert left_over(tmp_path) == []


# --- what is refused ------------------------------------------------------------------------------


def refused(bundle: Path, into: Path, match: str) -> None:
    with pytest.raises(BundleError, match=match):
        nb.unpack(bundle, into=into)
    assert not into.exists() or list(into.glob("[!.]*")) == []


def place_of(bundle: Path, end: str) -> int:
    """Where the content of a member begins."""
    with tarfile.open(bundle) as tar:
        return next(one.offset_data for one in tar if one.name.endswith(end))


@pytest.mark.parametrize("end", ["model.pt", "events.jsonl"])
def test_a_flipped_bit_in_a_members_header_is_found_and_nothing_is_unpacked(
    bundle: Path, tmp_path: Path, end: str
) -> None:
    raw = bytearray(bundle.read_bytes())
    raw[place_of(bundle, end) - 512] ^= 4
    bundle.write_bytes(raw)
    refused(bundle, tmp_path / "second", "is damaged: ")


def test_a_flipped_bit_in_a_checkpoint_is_found_where_it_is_loaded(
    bundle: Path, tmp_path: Path
) -> None:
    with tarfile.open(bundle) as tar:
        member = next(one for one in tar if "finished-" in one.name and one.name.endswith(".pt"))
        place = member.offset_data + member.size // 2
    raw = bytearray(bundle.read_bytes())
    raw[place] ^= 4
    bundle.write_bytes(raw)
    nb.unpack(bundle, into=tmp_path / "second")
    result = nb.attach(folder_of(tmp_path / "second", "finished")).result()
    with pytest.raises(CheckpointError):
        result.load_into(torch.nn.Linear(1, 1))


def test_a_bundle_that_was_cut_off_between_two_members_is_found(
    bundle: Path, tmp_path: Path
) -> None:
    with tarfile.open(bundle) as tar:
        last_but_one = tar.getmembers()[-2]
    os.truncate(bundle, last_but_one.offset)
    refused(bundle, tmp_path / "second", "is damaged: .*is not its last member: it was cut off")
    with bundle.open("ab") as file:
        file.write(bytes(10_240))  # the end mark of a tar file
    refused(bundle, tmp_path / "second", "is damaged: .*is not its last member: it was cut off")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.98])
def test_a_bundle_that_was_cut_off_is_found(bundle: Path, tmp_path: Path, share: float) -> None:
    os.truncate(bundle, int(bundle.stat().st_size * share))
    refused(bundle, tmp_path / "second", r"is damaged: .*\n  Allowed: a file exactly as nb\.pack")


def test_a_foreign_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "text.bundle").write_text("# v2 git bundle\n" * 1000)
    with tarfile.open(tmp_path / "other.bundle", "w") as tar:
        tar.addfile(tarfile.TarInfo("hello"), io.BytesIO())
    for name in ("text.bundle", "other.bundle"):
        refused(tmp_path / name, tmp_path / "second", "is not an nbtoolkit bundle: ")
    with pytest.raises(BundleError, match=r"there is no .*gone\.bundle\n  Allowed"):
        nb.unpack(tmp_path / "gone.bundle", into=tmp_path / "second")


def rewritten(bundle: Path, change: Callable[[tarfile.TarInfo], tarfile.TarInfo]) -> None:
    """Write the same bundle with a member changed."""
    with tarfile.open(bundle) as tar:
        headers = tar.pax_headers
        members = [(one, source.read() if (source := tar.extractfile(one)) else b"") for one in tar]
    with tarfile.open(bundle, "w", pax_headers=headers) as tar:
        for member, content in members:
            tar.addfile(change(member), io.BytesIO(content))


def named(name: str) -> Callable[[tarfile.TarInfo], tarfile.TarInfo]:
    def change(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if member.name.endswith("curve.png"):
            member.name = name
        return member

    return change


def linked(kind: bytes) -> Callable[[tarfile.TarInfo], tarfile.TarInfo]:
    def change(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if member.name.endswith("curve.png"):
            member.type, member.linkname, member.size = kind, "/etc/passwd", 0
        return member

    return change


@pytest.mark.parametrize(
    "change",
    [
        named("../out.txt"),
        named("a/../../out.txt"),
        named("/out.txt"),
        linked(tarfile.SYMTYPE),
        linked(tarfile.LNKTYPE),
        linked(tarfile.FIFOTYPE),
    ],
)
def test_what_leads_out_of_the_folder_is_refused(
    bundle: Path, tmp_path: Path, change: Callable[[tarfile.TarInfo], tarfile.TarInfo]
) -> None:
    rewritten(bundle, change)
    refused(bundle, tmp_path / "second", "which nb.pack never writes")
    assert not (tmp_path / "out.txt").exists()


def test_a_member_of_negative_size_is_refused(bundle: Path, tmp_path: Path) -> None:
    """tarfile would come back to the same member again and again."""

    def change(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if member.name.endswith("curve.png"):
            member.pax_headers = {"size": "-1024"}
        return member

    rewritten(bundle, change)
    refused(bundle, tmp_path / "second", "is damaged: ")


def test_a_python_whose_tarfile_has_no_filters_reads_folders_only(
    bundle: Path, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    refused(bundle, tmp_path / "second", r"cannot unpack a bundle safely(?s:.*)Python 3\.10\.12")
    assert len(nb.unpack(outputs, into=tmp_path / "second").new) == 4


# --- how it meets what is there -------------------------------------------------------------------


def test_unpacking_twice_changes_nothing(bundle: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    nb.unpack(bundle, into=second)
    before = {path: path.stat().st_mtime_ns for path in second.rglob("[!.]*") if path.is_file()}
    again = nb.unpack(bundle, into=second)
    assert (again.new, again.advanced, again.files, len(again.unchanged)) == ((), (), 0, 4)
    locks = set(second.glob("*/owner.lock"))
    after = {path: path.stat().st_mtime_ns for path in second.rglob("[!.]*") if path.is_file()}
    assert {path: time for path, time in after.items() if path not in locks} == before


def test_an_equal_run_gets_the_files_that_it_lacks_and_keeps_its_own(
    bundle: Path, tmp_path: Path
) -> None:
    nb.unpack(bundle, into=tmp_path / "second")
    run = folder_of(tmp_path / "second", "finished")
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    (lost,) = run.glob("checkpoints/best-*/model.pt")
    lost.unlink()
    (run / "config.yaml").write_text("mine")
    assert run.name in nb.unpack(bundle, into=tmp_path / "second").unchanged
    assert lost.exists()
    assert (run / "config.yaml").read_text() == "mine"


def append(folder: Path, text: str) -> None:
    with RunPaths(folder).events.open("a") as diary:
        diary.write(json.dumps({"t": 1, "type": "note", "level": "info", "text": text}) + "\n")


def test_what_is_further_here_stays_and_what_is_further_there_is_taken(
    bundle: Path, outputs: Path, tmp_path: Path
) -> None:
    ours, theirs = folder_of(outputs, "unfinished"), folder_of(outputs, "finished")
    append(ours, "gone on here")
    raw = theirs.joinpath("events.jsonl").read_bytes()
    theirs.joinpath("events.jsonl").write_bytes(raw[: raw.index(b"\n") + 1])
    before = tree(ours)
    done = nb.unpack(bundle, into=outputs)
    assert done.advanced == (theirs.name,)
    assert theirs.joinpath("events.jsonl").read_bytes() == raw
    assert tree(ours) == before
    assert len(done.unchanged) == 3
    hidden = {path.name for path in outputs.glob(".*")}
    assert hidden == {".unpack.lock"}


def test_a_run_that_went_on_in_both_places_stays_as_it_is_here(
    bundle: Path, outputs: Path, tmp_path: Path
) -> None:
    ours, long = folder_of(outputs, "unfinished"), "x" * 2**20
    append(ours, f"{long} there")
    elsewhere = nb.pack(tmp_path / "elsewhere.bundle", source=outputs)
    nb.unpack(bundle, into=tmp_path / "here")
    append(folder_of(tmp_path / "here", "unfinished"), f"{long} here")
    (folder_of(tmp_path / "here", "unfinished") / "owner.lock").touch()
    before = tree(folder_of(tmp_path / "here", "unfinished"))
    done = nb.unpack(elsewhere.path, into=tmp_path / "here")
    assert any("was resumed here, too" in note for note in done.notes)
    assert done.conflicting == (folder_of(outputs, "unfinished").name,)
    assert "3 unchanged, 1 conflicting" in repr(done)
    assert tree(folder_of(tmp_path / "here", "unfinished")) == before


def test_a_run_that_goes_on_here_is_left_alone(bundle: Path, outputs: Path) -> None:
    run = RunPaths(folder_of(outputs, "unfinished"))
    run.events.write_text("")  # it has just begun
    lock = lock_run(run)
    assert lock is not None
    done = nb.unpack(bundle, into=outputs)
    lock.release()
    assert f"{run.run_id} is running here: it was left as it is" in done.notes
    assert run.events.read_text() == ""


def test_a_newer_file_here_stays(bundle: Path, outputs: Path) -> None:
    picture = outputs / "pipeline/plots/curve.png"
    picture.write_bytes(b"drawn anew")
    nb.unpack(bundle, into=outputs)
    assert picture.read_bytes() == b"drawn anew"


# --- where it is found ----------------------------------------------------------------------------


def host(root: Path, data: Path | None = None) -> Host:
    return Host(kind="kaggle", reason="a test", working=root, scratch=root, kept=root, input=data)


def test_the_newest_bundle_of_all_that_is_mounted_is_found(outputs: Path, tmp_path: Path) -> None:
    data, working = tmp_path / "input", tmp_path / "working"
    for place in ("notebooks/me/run-1", "run-2", "images", ".hidden"):
        (data / place).mkdir(parents=True)
    working.mkdir()
    (data / "images/git.bundle").write_text("# v2 git bundle\n")
    nb.pack(data / "notebooks/me/run-1", source=outputs)
    newest = nb.pack(data / "run-2", source=outputs)
    shutil.copy(newest.path, data / ".hidden")
    os.utime(newest.path, (1, 1))  # not the file's time counts: a copy has another one
    assert find_source("auto", host(working, data)) == newest.path
    own = nb.pack(working, source=outputs)
    assert find_source("auto", host(working, data)) == own.path


def test_without_a_bundle_the_runs_of_a_session_that_died_are_found(
    outputs: Path, tmp_path: Path
) -> None:
    data, working = tmp_path / "first", tmp_path / "working"
    working.mkdir()
    there = host(working, data)
    assert find_source("auto", there) == outputs
    done = nb.unpack(into=working / "outputs", host=there)
    assert len(done.new) == 4
    assert len(runs_in(working / "outputs")) == 4
    before = {path.name for path in outputs.iterdir()}
    (outputs / "more.txt").write_text("not looked at: no run has changed")
    assert len(nb.unpack(into=working / "outputs", host=there).unchanged) == 4
    lock = {".unpack.lock"}
    assert {path.name for path in (working / "outputs").iterdir()} == before | lock
    (working / "outputs/pipeline/plots/curve.png").unlink()
    assert nb.unpack(into=working / "outputs", host=there).files == 1
    append(folder_of(outputs, "finished"), "gone on")
    again = nb.unpack(into=working / "outputs", host=there)
    assert again.advanced == (folder_of(outputs, "finished").name,)


def test_of_several_folders_of_runs_the_one_with_the_newest_run_is_found(
    outputs: Path, tmp_path: Path
) -> None:
    data = tmp_path / "input"
    for name, run in (("a", "unfinished"), ("b", "folded"), ("c", "finished")):
        shutil.copytree(folder_of(outputs, run), data / name / folder_of(outputs, run).name)
    shutil.copytree(outputs, data / "deeper/still/outputs")
    assert find_source("auto", host(tmp_path / "first", data)) == data / "b"


def test_of_a_bundle_that_was_taken_only_the_events_are_read_again(
    bundle: Path, outputs: Path, tmp_path: Path
) -> None:
    second, there = tmp_path / "second", host(tmp_path)
    assert len(nb.unpack(into=outputs, host=there).unchanged) == 4  # it came from there
    assert len(nb.unpack(into=second, host=there).new) == 4
    weights = next(folder_of(second, "finished").glob("checkpoints/best-*/model.pt"))
    weights.unlink()
    assert len(nb.unpack(into=second, host=there).unchanged) == 4
    assert not weights.exists()
    nb.unpack(bundle, into=second, host=there)  # a path that is named is always read
    assert weights.exists()
    pickles = folder_of(second, "folded") / "folds/0/predictor.pkl"
    assert not pickles.exists()
    assert len(nb.unpack(into=second, host=there, trust=True).unchanged) == 4
    assert pickles.exists()
    shutil.rmtree(folder_of(second, "finished"))
    assert len(nb.unpack(into=second, host=there).new) == 1


def test_nothing_to_unpack_is_no_error_unless_a_place_is_named(tmp_path: Path) -> None:
    done = nb.unpack(into=tmp_path / "outputs", host=host(tmp_path))
    assert done.bundle is None
    assert "nothing found" in repr(done)
    with pytest.raises(BundleError, match=rf"there is no bundle in {tmp_path}\n  Allowed: a file"):
        nb.unpack(tmp_path, into=tmp_path / "outputs")


def test_a_bundle_goes_to_the_users_output_folder_wherever_it_lay(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "first")
    outputs.rename(tmp_path / "first/code")
    bundle = nb.pack(tmp_path / "other.bundle", source="code").path
    (tmp_path / "second/code").mkdir(parents=True)
    (tmp_path / "second/code/module.py").touch()
    monkeypatch.chdir(tmp_path / "second")
    done = nb.unpack(bundle)
    assert (done.folder, len(done.new)) == (tmp_path / "second/outputs", 4)
    assert [path.name for path in Path("code").iterdir()] == ["module.py"]
    mine = nb.load_config(env=None, overrides={"runtime.output_dir": "mine"})
    assert nb.unpack(bundle, config=mine).folder == tmp_path / "second/mine"


def test_a_pipeline_is_packed_by_its_own_folder_too(outputs: Path, tmp_path: Path) -> None:
    shutil.move(folder_of(outputs, "finished"), outputs / "pipeline")
    packed = nb.pack(tmp_path, source=outputs / "pipeline")
    assert packed.left_out == ()
    nb.unpack(packed.path, into=tmp_path / "second")
    assert (tmp_path / "second/pipeline/steps/first.run.json").exists()
    assert len(runs_in(tmp_path / "second/pipeline")) == 1


def test_runs_below_the_output_folder_go_to_where_they_were_below_it(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs.rename(tmp_path / "first/deeper")
    outputs.mkdir()
    shutil.move(tmp_path / "first/deeper", outputs)
    monkeypatch.chdir(tmp_path / "first")
    packed = nb.pack(tmp_path, source="outputs/deeper")
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "second")
    done = nb.unpack(packed.path)
    assert done.folder == tmp_path / "second/outputs"
    assert len(runs_in("outputs/deeper")) == len(done.new) == 4


# --- by itself ------------------------------------------------------------------------------------


def at_deadline(outputs: Path, there: Host, setting: str) -> tuple[PackResult | None, list[str]]:
    """What comes of the unfinished run's deadline, with ``runtime.pack`` set so."""
    paths, said = RunPaths(folder_of(outputs, "unfinished")), []
    text = paths.events.read_text()
    assert '"pack": false' in text
    value = '"auto"' if setting == "auto" else setting
    paths.events.write_text(text.replace('"pack": false', f'"pack": {value}'))
    return pack_for_next_session(paths, said.append, host=there), said


@pytest.mark.parametrize(
    ("kind", "setting", "packs"),
    [
        ("kaggle", "auto", True),
        ("colab", "auto", True),
        ("jupyter", "auto", False),
        ("slurm", "auto", False),
        ("kaggle", "false", False),
        ("script", "true", True),
    ],
)
def test_a_run_is_packed_at_its_deadline_where_sessions_end(
    outputs: Path, tmp_path: Path, kind: HostKind, setting: str, packs: bool
) -> None:
    packed, said = at_deadline(outputs, replace(host(tmp_path), kind=kind), setting)
    assert (tmp_path / DEFAULT_NAME).exists() == packs
    assert len(said) == packs
    if packs:
        assert packed is not None
        assert packed.path == tmp_path / DEFAULT_NAME
        assert "and launch again" in said[0]


def test_colab_without_drive_keeps_nothing_and_says_so(outputs: Path, tmp_path: Path) -> None:
    packed, said = at_deadline(outputs, replace(host(tmp_path), kind="colab", kept=None), "auto")
    assert packed is not None
    assert "ends with this session: download it, or mount Google Drive" in said[1]


def test_a_bundle_that_cannot_be_written_is_a_warning_and_no_error(
    outputs: Path, tmp_path: Path
) -> None:
    with files_up_to(30_000):
        packed, said = at_deadline(outputs, host(tmp_path), "auto")
    assert packed is None
    assert said[0].startswith("warning: nothing was packed for the next session: the bundle")


def runs_until_told(config: nb.Config, ctx: nb.RunContext) -> None:
    step = 0
    while True:
        ctx.report({"step": step}, step=(step := step + 1))


@pytest.mark.parametrize("start", ["forkserver", "inline"])
def test_a_launch_is_packed_once_by_who_waits_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start: Start,
) -> None:
    monkeypatch.chdir(tmp_path)
    short = {"runtime.time_budget": 0.2, "runtime.pack": True, "tracking.mlflow": False}
    ended = nb.launch(runs_until_told, nb.load_config(env=None, overrides=short), start=start)
    assert ended.status == "deadline"
    assert "packed for the next session: PackResult(1 run, " in capsys.readouterr().out
    (tmp_path / DEFAULT_NAME).unlink()
    assert nb.attach(ended.paths.folder).result().status == "deadline"
    assert not (tmp_path / DEFAULT_NAME).exists()


# --- what is shown --------------------------------------------------------------------------------


def test_results_show_what_was_done_and_names_are_escaped(outputs: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<b>odd"
    odd.mkdir()
    packed = nb.pack(odd, source=outputs)
    unpacked = nb.unpack(odd, into=tmp_path / "second")
    assert repr(packed).startswith("PackResult(4 runs, ")
    assert "4 new; other files: 2" in repr(unpacked)
    for shown in (packed._repr_html_(), unpacked._repr_html_()):
        assert "&lt;b&gt;odd" in shown
        assert "<b>odd" not in shown


def test_the_command_line_packs_and_unpacks(outputs: Path, tmp_path: Path) -> None:
    def run(*words: object) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "nbtoolkit", *map(str, words)]
        return subprocess.run(
            program, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
        )

    packed = run("pack", tmp_path, "--source", outputs, "--size-limit", "1GB")
    assert packed.returncode == 0, packed.stderr
    bundle = Path(packed.stdout.strip())
    assert bundle.exists()
    unpacked = run("unpack", bundle, "--into", tmp_path / "second")
    assert "4 new" in unpacked.stdout
    bundle.write_bytes(b"")
    again = run("unpack", bundle, "--into", tmp_path / "second")
    assert (again.returncode, "is not an nbtoolkit bundle" in again.stderr) == (2, True)
