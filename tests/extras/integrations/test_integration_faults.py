"""What an integration refuses: versions, back ends, the kernel, ranks, foreign checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fits import Run, configured

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, FitError, LaunchError, MissingExtra, PlanError
from nbtoolkit.extras.integrations import support

FRAMEWORKS = ("lightning", "transformers", "keras")
INSTALL = "pip install -U '{}>=1.0'"


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    settings = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    return nb.load_config(env=None, overrides=settings)


def installed(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"NOT TESTED: {name} is not installed (make test-integrations)")


def imported(name: str, folder: Path, then: str = "", **environ: str) -> str:
    """The error of importing an integration in a process with ``folder`` first."""
    module = f"nbtoolkit.integrations.{name}"
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import {module}; {module}{then}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stderr


# --- versions and back ends ---


def test_a_framework_that_is_missing_gives_the_install_line() -> None:
    line = INSTALL.format("no_such_framework")
    with (
        pytest.raises(MissingExtra, match=f"No module named 'no_such_framework'[\\s\\S]*{line}"),
        support.requires("no_such_framework", "1.0"),
    ):
        import_module("no_such_framework")


def test_a_framework_that_cannot_be_imported_gives_the_reason() -> None:
    with (
        pytest.raises(MissingExtra, match=r"needs torch 1\.0 or newer: no such part"),
        support.requires("torch", "1.0"),
    ):
        raise ImportError("no such part")


@pytest.mark.apart
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_that_is_too_old_is_refused(name: str, tmp_path: Path) -> None:
    """An old version is first on the path, with the metadata that pip would write."""
    (tmp_path / f"{name}-2.0.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n"
    (tmp_path / f"{name}-2.0.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    error = imported(name, tmp_path)
    assert re.search(rf"needs {name} \S+ or newer: {name} 2\.0 is installed", error)
    assert f"pip install -U '{name}>=" in error


def test_a_back_end_of_keras_that_is_not_installed_is_named(tmp_path: Path) -> None:
    installed("keras")
    error = imported("keras", tmp_path, KERAS_BACKEND="no_such_backend")
    assert "Keras would use its back end 'no_such_backend' (KERAS_BACKEND)" in error
    assert "set os.environ['KERAS_BACKEND'] = 'torch' before the first import of keras" in error


# --- outside of train ---


def test_a_trainer_in_the_kernel_is_refused(config: nb.Config) -> None:
    with pytest.raises(LaunchError, match=r"trainer_arguments\(ctx\) was called with 'NoneType'"):
        support.check_inside_train(None, "trainer_arguments")
    kept: list[nb.RunContext] = []
    nb.launch(lambda config, ctx: kept.append(ctx), config, start="inline", display="off")
    with pytest.raises(LaunchError, match=r"called outside of train[\s\S]*make the trainer inside"):
        support.resume_from(kept[0])


@pytest.mark.apart
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("lightning", "trainer_arguments"),
        ("lightning", "callback"),
        ("transformers", "training_arguments"),
        ("transformers", "callback"),
        ("keras", "callback"),
        ("keras", "initial_epoch"),
    ],
)
def test_each_function_is_refused_in_the_kernel(name: str, call: str, tmp_path: Path) -> None:
    installed(name)
    error = imported(name, tmp_path, f".{call}(object())", KERAS_BACKEND="torch")
    assert f"LaunchError: {call}(ctx) was called with 'object'" in error


# --- checkpoints ---


def test_a_checkpoint_of_another_kind_is_not_resumed(config: nb.Config) -> None:
    def train_and_save(config: nb.Config, ctx: nb.RunContext) -> None:
        ctx.save({"mine": 1})
        with pytest.raises(CheckpointError, match=r"no checkpoint of a trainer, only mine"):
            support.resume_from(ctx)

    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        assert support.resume_from(ctx) is None
        support.record_checkpoint(ctx, ctx.paths.checkpoints / "gone.ckpt", 1, "trainer")
        with pytest.raises(CheckpointError, match=r"gone\.ckpt is missing"):
            support.resume_from(ctx)

    nb.launch(train_and_save, config, start="inline", display="off")
    result = nb.launch(train, config, start="inline", display="off")
    with pytest.raises(CheckpointError, match=r"gone\.ckpt is missing"):
        support.last_checkpoint(result)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        support.last_checkpoint(result.paths.folder / "checkpoints")


def test_old_checkpoints_of_a_training_go_and_those_of_others_stay(config: nb.Config) -> None:
    names = ("tuning-2", "tuning[2]", "tuning")

    def train(config: nb.Config, ctx: nb.RunContext) -> None:
        ctx.paths.checkpoints.mkdir(exist_ok=True)
        for name in names:
            for step in range(1, 5):
                path = ctx.paths.checkpoints / f"{name}-{step:09d}.ckpt"
                path.touch()
                support.record_checkpoint(ctx, path, step, name, suffix=".ckpt")

    result = nb.launch(train, config, start="inline", display="off")
    left = {path.name for path in result.paths.checkpoints.glob("*.ckpt")}
    assert left == {f"{name}-{step:09d}.ckpt" for name in names for step in (3, 4)}


# --- Keras ---


def keras_model() -> Any:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    return model


def fit_without_initial_epoch(config: nb.Config, ctx: nb.RunContext) -> None:
    import numpy as np

    from nbtoolkit.integrations import keras as nbk

    x = np.ones((8, 4), dtype="float32")
    keras_model().fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[nbk.callback(ctx)])
    if ctx.load("again") is None:
        ctx.save({"done": 1}, kind="again")
        raise RuntimeError("once")


@pytest.mark.apart
def test_keras_on_two_ranks_is_refused_before_it_trains(
    config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    two = config.with_overrides({"distributed.world_size": 2, "distributed.enabled": True})
    with pytest.raises(PlanError, match=r"Keras 3 trains in one process[\s\S]*world_size: 1"):
        nb.launch(fit_without_initial_epoch, two, display="off")


@pytest.mark.apart
def test_a_resumed_keras_fit_must_not_begin_at_epoch_0(
    config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    train: Callable[..., Any] = fit_without_initial_epoch
    with pytest.raises(RuntimeError, match="once"):
        nb.launch(train, config, display="off")
    with pytest.raises(FitError, match=r"resumes with epoch 2, and model\.fit begins with 0"):
        nb.launch(train, config, display="off")


def test_other_trainers_refuse_what_they_would_not_do(tmp_path: Path) -> None:
    ctx = Run(tmp_path / "run").context(configured())
    support.check_strategy(ctx, "Lightning's Trainer")
    ctx.plan = replace(ctx.plan, strategy="fsdp")
    with pytest.raises(PlanError, match="is fsdp, and Lightning's Trainer would train with DDP"):
        support.check_strategy(ctx, "Lightning's Trainer")
