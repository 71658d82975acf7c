"""checkpoint.format: sharded, on real ranks over gloo: each rank writes and reads its own part."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import close, configured, launch, samples, state_of
from frameworks import needs_torch
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore, StoredCheckpoint
from nbtoolkit.run.checkpoints.shards import read_shards
from nbtoolkit.training.strategies.sharded_checkpoint import writes_parts
from nbtoolkit.worker.context import RunContext

pytestmark = needs_torch(2, 8)

SHARDED = {"distributed.strategy": "fsdp", "checkpoint.format": "sharded"}
ADAM = {"optim.name": "adamw", "optim.lr": 0.01, "optim.momentum": 0.0}


def net(config: Config, seed: int = 0) -> nn.Sequential:
    """Layers with an odd number of rows, and one that is shorter than three ranks."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d if config.model.to_dict().get("norm") == "batch" else nn.LayerNorm
    return nn.Sequential(nn.Linear(6, 15), norm(15), nn.Tanh(), nn.Linear(15, 2), nn.Linear(2, 3))


def settings(folder: Path, **more: Any) -> Config:
    base = {"runtime.output_dir": str(folder), "distributed.fallback": False}
    each = {"checkpoint.every_steps": 2, "train.drop_last": True}
    return configured(overrides={**base, **ADAM, **each, **more})


def fitted(config: Config, ctx: RunContext) -> Any:
    """Fit; the first launch stops after step 7 of 9, in the middle of an epoch."""
    first = config.seed == 0 and not (ctx.paths.folder / "stopped").exists()
    model = net(config, ctx.rank)

    class Stop(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if first and state.step == 7:
                raise KeyboardInterrupt

    data, more = (samples(37), samples(11, seed=1)), {"callbacks": [Stop()] if first else []}
    try:
        values = nb.fit(ctx, config, model, *data, loss=cross_entropy, **more)
    except KeyboardInterrupt:
        if ctx.is_main:
            (ctx.paths.folder / "stopped").touch()
        raise RuntimeError("stopped here") from None
    return values, state_of(model)


def stopped(folder: Path, config: Config, ranks: int) -> tuple[Path, StoredCheckpoint]:
    """The folder of a run that was stopped, and its newest checkpoint."""
    with pytest.raises(RuntimeError, match="stopped here"):
        launch(fitted, config, ranks=ranks, name="resumed")
    (run,) = folder.glob("*resumed*")
    newest, damages = CheckpointStore(run / "checkpoints").good("step")
    assert newest is not None
    assert not damages
    return run, newest


def uninterrupted(config: Config, ctx: RunContext) -> Any:
    model = net(config)
    data = samples(37), samples(11, seed=1)
    return nb.fit(ctx, config, model, *data, loss=cross_entropy), state_of(model)


@pytest.mark.parametrize(
    ("ranks", "after"),
    [
        pytest.param(2, ("fsdp", 2), marks=pytest.mark.long),
        pytest.param(3, ("fsdp", 2), marks=pytest.mark.long),
        pytest.param(2, ("fsdp", 3), marks=pytest.mark.long),
        pytest.param(2, ("ddp", 2), marks=pytest.mark.long),
        pytest.param(3, ("pipeline", 2), marks=pytest.mark.long),
    ],
)
def test_parts_are_read_on_other_ranks_and_strategies(
    tmp_path: Path, ranks: int, after: tuple[str, int]
) -> None:
    # A batch norm takes its statistics from each rank's part of a batch.
    same = after == ("fsdp", ranks)
    config = settings(tmp_path, **SHARDED, **{"model.norm": "batch" if same else "layer"})
    whole = launch(uninterrupted, config, ranks=ranks)
    run, newest = stopped(tmp_path, config, ranks)
    # No file holds more than its rank's part, and none is a pickle.
    files = sorted((newest.folder / "shards").iterdir())
    assert [file.name[:12] for file in files] == [f"shard-{n + 1:05d}-" for n in range(ranks)]
    assert {file.suffix for file in files} == {".safetensors"}
    training = torch.load(newest.folder / "training.pt", weights_only=True)
    assert training["step"] == 6
    assert not any(training["optimizer"]["state"].values())
    second = config.with_overrides({"distributed.strategy": after[0], "checkpoint.format": "auto"})
    resumed = launch(fitted, second, ranks=after[1], resume=run)
    assert "fit: resumes after epoch 2," not in (run / "ranks/0/log.txt").read_text()
    assert "fit: resumes after epoch" in (run / "ranks/0/log.txt").read_text()
    (values, weights), (expected, wanted) = resumed.value, whole.value
    assert values == pytest.approx(expected, abs=1e-4)
    close(weights, wanted)


def test_parts_load_into_plain_inference_and_an_archive(tmp_path: Path) -> None:
    config = settings(tmp_path, **SHARDED, **{"train.epochs": 2})
    result = launch(uninterrupted, config)
    _, weights = result.value
    for path in (result.paths.folder, result.checkpoint, result):
        close(state_of(nb.load_model(path, net(config, 5))), weights, atol=0)
    close(state_of(result.load_into(net(config, 5), "last")), weights, atol=0)
    packed = nb.pack(tmp_path / "packed.bundle", source=tmp_path)
    nb.unpack(packed.path, into=tmp_path / "unpacked")
    (run,) = (tmp_path / "unpacked").rglob("config.yaml")
    close(state_of(nb.load_model(run.parent, net(config, 5))), weights, atol=0)
    with pytest.raises(CheckpointError, match=r"does not fit this Sequential: 1.weight is"):
        nb.load_model(result.paths.folder, nn.Sequential(nn.Tanh(), nn.Linear(6, 3)))


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def test_a_checkpoint_cut_in_half_falls_back_to_the_one_before(tmp_path: Path) -> None:
    config = settings(tmp_path, **SHARDED)
    run, newest = stopped(tmp_path, config, 2)
    cut(next((newest.folder / "shards").glob("shard-00002-*")))
    with pytest.raises(CheckpointError, match=r"is damaged: shards/shard-00002.* bytes of"):
        nb.load_model(newest.folder, net(config))
    launch(fitted, config, resume=run)
    log = (run / "events.jsonl").read_text()
    assert f"skipped a damaged checkpoint, {newest.folder.name}" in log
    assert "resuming from step-000000004" in log


@pytest.mark.long
def test_a_rank_killed_while_it_writes_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    config = settings(tmp_path, **SHARDED)
    with pytest.raises(Exception, match=r"rank 1|SIGKILL|killed"):
        launch(killed_while_writing, config, name="resumed")
    (run,) = tmp_path.glob("*resumed*")
    newest, damages = CheckpointStore(run / "checkpoints").good("step")
    assert newest is not None
    assert (newest.step, damages) == (4, [])
    resumed = launch(killed_while_writing, config, resume=run)
    assert resumed.status == "completed"
    assert not list((run / "checkpoints").glob(".*"))


def killed_while_writing(config: Config, ctx: RunContext) -> Any:
    """Rank 1 dies in step 6, when its part of the checkpoint is on disk and rank 0 waits for it."""
    mark = ctx.paths.folder / "killed"
    first = not mark.exists()

    class Die(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if first and ctx.rank == 1 and state.step == 6:
                threading.Thread(target=self.die, daemon=True).start()

        def die(self) -> None:
            pattern = ".shards-.*/shard-00002-*"
            while not list(ctx.paths.checkpoints.glob(pattern)):
                time.sleep(0)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model, data = net(config), (samples(37), samples(11, seed=1))
    return nb.fit(ctx, config, model, *data, loss=cross_entropy, callbacks=[Die()])


def test_a_format_that_this_strategy_does_not_write_is_said(tmp_path: Path) -> None:
    config = settings(tmp_path, **{"checkpoint.format": "sharded", "train.epochs": 1})
    result = launch(uninterrupted, config, ranks=1)
    assert "checkpoint.format: sharded has nothing to do" in result.paths.log(0).read_text()


def without_room(config: Config, ctx: RunContext) -> Any:
    """From step 3 on rank 1 cannot write more than some bytes of a file, as on a full disk."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if ctx.rank == 1 and state.step == 3:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))

    model, data = net(config), (samples(37), samples(11, seed=1))
    values = nb.fit(ctx, config, model, *data, loss=cross_entropy, callbacks=[Fill()])
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return values


@pytest.mark.long
def test_a_rank_that_cannot_write_costs_its_checkpoints_only(tmp_path: Path) -> None:
    result = launch(without_room, settings(tmp_path, **SHARDED, **{"train.epochs": 2}))
    assert result.status == "completed"
    assert "training continues without a checkpoint" in result.paths.events.read_text()
    newest, damages = CheckpointStore(result.paths.checkpoints).good("step")
    assert newest is not None
    assert (newest.step, damages) == (2, [])
    assert not list(result.paths.checkpoints.glob(".*"))


def test_parts_are_for_large_models_and_for_a_torch_that_can() -> None:
    small, large = nn.Linear(8, 8), nn.Linear(20_000, 20_000, device="meta")
    assert not writes_parts("auto", small, able=True)
    assert writes_parts("auto", large, able=True)
    assert not writes_parts("auto", large, able=False)
    assert not writes_parts("whole", large, able=True)
    assert writes_parts("sharded", small, able=True)
    with pytest.raises(FitError, match=r"cannot write such files(.|\n)*2.8 or newer(.|\n)*whole"):
        writes_parts("sharded", small, able=False)


def test_parts_without_safetensors_or_damaged_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-000000002/shards"
    folder.mkdir(parents=True)
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match=r"step-000000002 cannot be read: SafetensorError"):
        read_shards(folder, "model.")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"is sharded, and safetensors(.|\n)*pip install"):
        read_shards(folder, "model.")
