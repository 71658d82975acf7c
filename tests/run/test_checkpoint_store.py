"""Checkpoints on disk are complete or absent; damaged ones are skipped, the oldest removed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from feeds import contexts
from limits import files_up_to

from nbtoolkit.environment.resources import free_space
from nbtoolkit.errors import CheckpointError
from nbtoolkit.run.checkpoints.checkpoint_store import (
    CheckpointStore,
    StoredCheckpoint,
    read_state,
    write_state,
)
from nbtoolkit.run.checkpoints.weights import load_model
from nbtoolkit.run.paths import temporary_beside
from nbtoolkit.training.checkpoints import AsyncCheckpointWriter, CheckpointManager, HostCopy
from nbtoolkit.training.strategy import HostState

PARTS = {
    "model": {"weight": torch.arange(6.0)},
    "training": {"progress": {"epoch": 2}, "rates": [0.1], "betas": (0.9, 0.999)},
}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def put(store: CheckpointStore, step: int, kind: str = "step") -> Path:
    return store.put(kind, step, PARTS, {"epoch": step // 10})


def test_a_checkpoint_is_read_as_it_was_put(store: CheckpointStore) -> None:
    path = put(store, 20)
    entry, wrong = store.good("step")
    assert entry is not None
    assert (entry.folder, entry.step, wrong) == (path, 20, [])
    assert json.loads((path / "manifest.json").read_text())["epoch"] == 2
    torch.testing.assert_close(entry.read("model")["weight"], torch.arange(6.0))
    assert entry.read("training") == PARTS["training"]


def test_names_of_torch_compile_stay_out_of_the_file_and_come_back_to_the_loop(
    tmp_path: Path,
) -> None:
    path, weight = tmp_path / "last.pt", torch.arange(6.0).reshape(2, 3)
    saved = {
        "model": {"module._orig_mod.weight": weight, "module._orig_mod.bias": weight[:, 0]},
        "others": [{"block._orig_mod.weight": weight}, {"weight": weight, "_orig_mod.weight": 1}],
    }
    write_state(path, saved)
    outside = torch.load(path, weights_only=True)
    assert list(outside["model"]) == ["module.weight", "module.bias"]
    assert list(outside["others"][0]) == ["block.weight"]
    assert list(outside["others"][1]) == ["weight", "_orig_mod.weight"]  # else one would be lost
    loaded = read_state(path)
    assert [list(one) for one in (loaded["model"], *loaded["others"])] == [
        list(one) for one in (saved["model"], *saved["others"])
    ]
    model = load_model(path, torch.nn.Linear(3, 2))
    torch.testing.assert_close(model.weight.detach(), weight)


def test_an_empty_store_has_nothing_good_and_nothing_wrong(store: CheckpointStore) -> None:
    assert store.good("step") == (None, [])


def test_the_newest_are_kept_and_one_best(store: CheckpointStore) -> None:
    for step in (10, 20, 30):
        put(store, step)
        put(store, step, "best")
    assert [entry.step for entry in store.entries("step")] == [30, 20]
    assert [entry.step for entry in store.entries("best")] == [30]
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "best-000000030",
        "step-000000020",
        "step-000000030",
    ]


def test_a_best_one_of_an_earlier_step_takes_the_place_of_a_later_one(
    store: CheckpointStore,
) -> None:
    """A run that goes on from an earlier checkpoint comes to the same best epoch again."""
    put(store, 30, "best")
    put(store, 20, "best")
    assert [entry.step for entry in store.entries("best")] == [20]


def test_a_step_taken_again_takes_the_place_of_the_first(store: CheckpointStore) -> None:
    put(store, 10)
    store.put("step", 10, {"model": {"weight": torch.ones(2)}}, {"epoch": 1})
    entry, _ = store.good("step")
    assert entry is not None
    assert entry.read("model")["weight"].tolist() == [1.0, 1.0]
    assert [path.name for path in store.folder.iterdir()] == ["step-000000010"]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("spoil", "file", "said"),
    [
        (flip_a_byte, "model.pt", "model.pt is damaged: its SHA-256 differs"),
        (cut, "training.pt", r"training.pt has \d+ bytes of \d+"),
        (Path.unlink, "model.pt", "model.pt is missing"),
        (cut, "manifest.json", "its manifest cannot be read"),
    ],
)
def test_a_damaged_one_is_passed_over_and_named(
    store: CheckpointStore, spoil, file: str, said: str
) -> None:
    put(store, 10)
    spoil(put(store, 20) / file)
    entry, wrong = store.good("step")
    assert entry is not None
    assert entry.step == 10
    assert len(wrong) == 1
    assert re.fullmatch(f"step-000000020: {said}", wrong[0])


@pytest.mark.parametrize("steps", [(20,), (10, 20)])
def test_when_all_are_damaged_nothing_is_begun_anew_in_silence(
    store: CheckpointStore, steps: tuple[int, ...]
) -> None:
    for step in steps:
        flip_a_byte(put(store, step) / "model.pt")
    with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged: step-000000020"):
        store.good("step")


def test_a_folder_of_somebody_else_is_not_one_of_ours(store: CheckpointStore) -> None:
    path = put(store, 10)
    (path / "manifest.json").write_text(json.dumps({"epoch": 3}))
    with pytest.raises(CheckpointError, match="is not a checkpoint's"):
        StoredCheckpoint.at(path)


def test_what_cannot_be_loaded_without_pickled_code_is_refused_by_name(
    store: CheckpointStore,
) -> None:
    with pytest.raises(CheckpointError, match=r"state\['model'\] is a builtins.set"):
        store.put("step", 1, {"model": {"model": {1}}}, {"epoch": 0})
    assert list(store.folder.iterdir()) == []


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_pickled_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save(
        {"model": {"weight": torch.ones(2)}, "x": Harmful(tmp_path / "made")}, tmp_path / "a"
    )
    with pytest.raises(CheckpointError, match=r"cannot be read: \w*UnpicklingError"):
        read_state(tmp_path / "a")
    assert not (tmp_path / "made").exists()


def test_a_full_disk_leaves_the_last_good_one_and_nothing_half(store: CheckpointStore) -> None:
    put(store, 10)
    large = {"model": {"weight": torch.zeros(100_000)}}
    with files_up_to(50_000), pytest.raises(CheckpointError, match="could not be written"):
        store.put("step", 20, large, {"epoch": 2})
    assert [path.name for path in store.folder.iterdir()] == ["step-000000010"]
    entry, wrong = store.good("step")
    assert entry is not None
    assert (entry.step, wrong) == (10, [])


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write_state(path, {"step": 10})
    with files_up_to(50_000), pytest.raises(CheckpointError, match="could not be written"):
        write_state(path, {"weight": torch.zeros(100_000)})
    assert read_state(path) == {"step": 10}
    assert list(tmp_path.iterdir()) == [path]


# It is torch that takes long: imported once, for a child that saves and is killed, and another.
KILLED = """
import os, sys, torch
from pathlib import Path
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore
torch.set_num_threads(1)
for folder in sys.stdin:
    if not (child := os.fork()):
        store, step = CheckpointStore(Path(folder.strip()), keep=2), 0
        while True:
            weight = torch.full((50_000,), float(step := step + 1))
            store.put("step", step, {"model": {"weight": weight}}, {"epoch": 0})
            print(os.getpid(), step, flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_one(tmp_path: Path) -> None:
    """Killed at five different moments; what is found is never older than the last one reported."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for moment in range(5):
            folder = tmp_path / str(moment)
            program.stdin.write(f"{folder}\n")
            program.stdin.flush()
            for _ in range(3 + moment):
                saves, said = map(int, program.stdout.readline().split())
            for _ in range(moment * 20_000):
                pass
            os.kill(saves, signal.SIGKILL)
            while program.stdout.readline() != "killed\n":
                pass
            is_whole(folder, said)
        program.stdin.close()


def is_whole(folder: Path, said: int) -> None:
    """What a kill left: a whole checkpoint, no older than the one that was reported last."""
    store = CheckpointStore(folder)
    entry, wrong = store.good("step")
    assert entry is not None
    assert wrong == []
    assert entry.step >= said
    assert set(entry.read("model")["weight"].tolist()) == {float(entry.step)}
    store.tidy()
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


def test_what_a_killed_writer_left_is_removed_and_nothing_else(store: CheckpointStore) -> None:
    whole = [put(store, 10), put(store, 10, "best")]
    unfinished = temporary_beside(store.folder / "new-")
    unfinished.mkdir()
    (unfinished / "model.pt").write_bytes(b"the first half")
    store.tidy()
    assert {*store.folder.iterdir()} == {*whole}


def test_a_snapshot_is_a_copy_and_uses_its_memory_again() -> None:
    weight = torch.arange(4.0)
    snapshot = HostCopy()
    first = snapshot.update({"a": [weight, {"b": (weight, 3)}], "c": "text"})
    weight += 1
    assert first["a"][0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (first["a"][1]["b"][1], first["c"]) == (3, "text")
    second = snapshot.update({"a": [weight, {"b": (weight, 3)}], "c": "text"})
    assert second["a"][0].data_ptr() == first["a"][0].data_ptr()
    assert second["a"][0].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("other", [torch.arange(6.0), torch.arange(4), torch.zeros(())])
def test_a_snapshot_takes_new_memory_for_another_shape_or_type(other: torch.Tensor) -> None:
    snapshot = HostCopy()
    snapshot.update({"a": torch.arange(4.0)})
    copy = snapshot.update({"a": other})["a"]
    assert (copy.shape, copy.dtype) == (other.shape, other.dtype)
    assert torch.equal(copy, other)


def test_a_snapshot_keeps_what_is_in_cpu_memory_for_it_already() -> None:
    whole, mine = torch.zeros(4), torch.zeros(4)
    snapshot = HostCopy().update({"model": HostState(weight=whole), "more": mine})
    assert snapshot["model"]["weight"] is whole
    assert snapshot["more"] is not mine


def test_a_snapshot_of_a_part_of_a_tensor_saves_that_part_alone(store: CheckpointStore) -> None:
    large = torch.zeros(1_000_000)
    path = store.put("step", 1, HostCopy().update({"model": {"weight": large[:10]}}), {"epoch": 0})
    assert (path / "model.pt").stat().st_size < 10_000


def test_the_writer_writes_beside_and_says_what_is_there(store: CheckpointStore) -> None:
    said = []
    writer = AsyncCheckpointWriter(
        store, lambda path, step, kind: said.append((path.name, step, kind))
    )
    writer.put("step", 7, PARTS, {"epoch": 0})
    writer.put("best", 7, PARTS, {"epoch": 0})
    writer.wait()
    assert not writer.busy
    assert said == [("step-000000007", 7, "step"), ("best-000000007", 7, "best")]
    assert writer.failure() is None


def test_what_the_writer_could_not_write_is_told_once(store: CheckpointStore) -> None:
    writer = AsyncCheckpointWriter(store, lambda *_: None)
    writer.put("step", 7, {"model": {"bad": {1, 2}}}, {"epoch": 0})
    writer.wait()
    failure = writer.failure()
    assert failure is not None
    assert failure[0] == "step"
    assert isinstance(failure[1], CheckpointError)
    assert writer.failure() is None


# --- those of a fit ---


def test_the_best_weights_are_written_before_their_memory_is_used_again(tmp_path: Path) -> None:
    [ctx] = contexts(tmp_path / "run")
    with CheckpointManager(ctx, ctx.config) as manager:
        for step in (1, 2):
            weight = torch.full((10_000_000,), float(step))
            manager.keep_best({"model": {"weight": weight}}, step, {"epoch": step})
        [best] = CheckpointStore(ctx.paths.checkpoints).entries("best")
        assert best.step == 1
        assert best.read("model")["weight"].unique().tolist() == [1.0]


def test_best_weights_that_could_not_be_written_are_tried_again(tmp_path: Path) -> None:
    [ctx] = contexts(tmp_path / "run")
    with CheckpointManager(ctx, ctx.config) as manager:
        with files_up_to(50_000):
            manager.keep_best({"model": {"weight": torch.ones(100_000)}}, 1, {"epoch": 1})
            manager.finish_writing()
        store = CheckpointStore(ctx.paths.checkpoints)
        assert store.entries("best") == []
    assert [best.step for best in store.entries("best")] == [1]


def test_the_one_being_written_needs_space_beside_those_that_are_kept(tmp_path: Path) -> None:
    [ctx] = contexts(tmp_path / "run", checkpoint__keep_last=1)
    state = int(free_space(tmp_path) * 0.6)
    with pytest.raises(CheckpointError, match="1 kept and one being written"):
        CheckpointManager(ctx, ctx.config)._check_space(0, state)
