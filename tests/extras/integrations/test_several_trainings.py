"""Two trainings in one run, as before and after the layers of a model are unfrozen."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.extras.integrations.support import last_checkpoint

pytestmark = [pytest.mark.timeout(900), pytest.mark.apart]
NAMES = ({}, {"name": "tuning"})  # of the two trainings
EPOCHS = (2, 3)


def fail_once(ctx: nb.RunContext, epoch: int) -> None:
    """Raise at the begin of the second training's last epoch, in the first attempt."""
    first = ctx.paths.folder / "failed"
    if epoch == EPOCHS[1] - 1 and not first.exists() and ctx.config.data.fails:
        first.touch()
        raise OSError("a disk that failed")


def samples() -> Any:
    import numpy as np

    x = np.random.RandomState(0).rand(64, 8).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def lightning(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    import lightning as L
    import torch

    from nbtoolkit.integrations import lightning as nbl

    class Module(L.LightningModule):
        def __init__(self, part: int = 0) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
            self.begun: list[tuple[int, int]] = []

        def on_train_epoch_start(self) -> None:
            self.begun.append((self.part, self.current_epoch))
            if self.part:
                fail_once(ctx, self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            self.layers[0].requires_grad_(self.part == 1)
            return torch.optim.Adam(self.parameters(), 0.01)

    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, samples()))
    torch.manual_seed(0)
    module = Module()
    for module.part, name in enumerate(given(config)):
        arguments = nbl.trainer_arguments(ctx, **name, max_epochs=EPOCHS[module.part])
        loader = torch.utils.data.DataLoader(data, 16)
        trainer = L.Trainer(**arguments)
        path = nbl.resume_from(ctx, **name) if config.data.takes else None
        trainer.fit(module, loader, ckpt_path=path)
    weights = sum(float(one.abs().sum()) for one in module.parameters())
    return {"weights": weights, "begun": module.begun}


def transformers(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    import torch
    from transformers import Trainer, TrainerCallback

    from nbtoolkit.integrations import transformers as nbt

    begun: list[tuple[int, int]] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}

    class Look(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            begun.append((part, round(state.epoch)))
            if part:
                fail_once(ctx, round(state.epoch))

    rows = [
        {"x": torch.from_numpy(x), "labels": torch.from_numpy(y)}
        for x, y in zip(*samples(), strict=True)
    ]
    torch.manual_seed(0)
    model = Model()
    for part, name in enumerate(given(config)):
        model.layers[0].requires_grad_(part == 1)
        own = {"num_train_epochs": EPOCHS[part], "per_device_train_batch_size": 16}
        arguments = nbt.training_arguments(ctx, **name, **own, logging_steps=4)
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Look()])
        path = nbt.resume_from(ctx, **name) if config.data.takes else None
        trainer.train(resume_from_checkpoint=path)
    weights = sum(float(one.abs().sum()) for one in model.parameters())
    return {"weights": weights, "begun": begun}


def keras(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    return keras_fits(config, ctx)


def tensorflow(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    from nbtoolkit.integrations import keras as nbk

    with nbk.strategy(ctx).scope():
        return keras_fits(config, ctx)


def keras_fits(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    import keras

    from nbtoolkit.integrations import keras as nbk

    begun: list[tuple[int, int]] = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            begun.append((part, epoch))
            if part:
                fail_once(ctx, epoch)

    keras.utils.set_random_seed(0)
    layers = keras.layers.Dense(4), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), *layers])
    for part, name in enumerate(given(config)):
        model.layers[0].trainable = part == 1
        model.compile(keras.optimizers.Adam(0.01), "mse")
        callbacks, first = [nbk.callback(ctx, **name), Look()], nbk.initial_epoch(ctx, **name)
        fit = {"batch_size": 16, "epochs": EPOCHS[part], "shuffle": False, "verbose": 0}
        model.fit(*samples(), **fit, callbacks=callbacks, initial_epoch=first)
    weights = sum(float(abs(one).sum()) for one in model.get_weights())
    return {"weights": weights, "begun": begun}


def given(config: nb.Config) -> Any:
    return NAMES if config.data.named else ({}, {})


FRAMEWORKS = [lightning, transformers, keras, tensorflow]


@pytest.fixture(params=FRAMEWORKS, ids=lambda one: one.__name__)
def train(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if find_spec(request.param.__name__) is None:
        pytest.skip(f"NOT TESTED: {request.param.__name__} is not installed")
    backend = "tensorflow" if request.param is tensorflow else "torch"
    monkeypatch.setenv("KERAS_BACKEND", backend)
    return request.param


def settings(folder: Path, train: Any, **data: bool) -> nb.Config:
    own = {"runtime.output_dir": str(folder), "tracking.mlflow": False}
    own |= {
        "distributed.world_size": 1,
        "data": {"named": True, "fails": False, "takes": True, **data},
    }
    if train is tensorflow:
        own["distributed.backend"] = "tensorflow"
    return nb.load_config(env=None, overrides=own)


def test_a_second_training_has_a_name_and_resumes(train: Any, tmp_path: Path) -> None:
    whole = nb.launch(train, settings(tmp_path / "whole", train), display="off")
    every = [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    assert [[*one] for one in whole.value["begun"]] == every
    config = settings(tmp_path / "cut", train, fails=True)
    with pytest.raises(OSError, match="a disk that failed"):
        nb.launch(train, config, display="off")
    rest = nb.launch(train, config, display="off")
    # Nothing of the first training is repeated, and of the second one only its last epoch.
    assert [[*one] for one in rest.value["begun"]] == [[1, 2]]
    assert rest.value["weights"] == pytest.approx(whole.value["weights"], rel=1e-6)
    reported = {
        name
        for event in nb.attach(rest.paths.folder).events()
        if event.type in ("report", "metrics")
        for name in event.values
    }
    (metric,) = {"loss", "train_loss"} & reported
    assert f"tuning_{metric}" in reported
    assert last_checkpoint(rest) == last_checkpoint(rest, name="tuning")
    assert last_checkpoint(rest) != last_checkpoint(rest, name="trainer")
    with pytest.raises(CheckpointError, match=r"no training 'other' in .*, only 'trainer', 'tu"):
        last_checkpoint(rest, name="other")


def test_a_second_training_without_a_name_is_refused(train: Any, tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"two trainings of one run[\s\S]*pass name="):
        nb.launch(train, settings(tmp_path, train, named=False), display="off")


def begins_with_the_epoch_of_another(config: nb.Config, ctx: nb.RunContext) -> None:
    keras(config.with_overrides({"data.named": True}), ctx)
    from nbtoolkit.integrations import keras as nbk

    nbk.initial_epoch(ctx)  # that of the first training, whatever the name in the callback


@pytest.mark.parametrize("train", [keras], indirect=True)
def test_the_epoch_of_a_training_that_has_begun_is_refused(train: Any, tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"two trainings of one run[\s\S]*'trainer'"):
        nb.launch(begins_with_the_epoch_of_another, settings(tmp_path, train), display="off")


@pytest.mark.parametrize("train", [lightning, transformers], indirect=True)
def test_a_trainer_that_does_not_take_the_checkpoint_is_told(train: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, train, fails=True, takes=False)
    with pytest.raises(OSError, match="a disk that failed"):
        nb.launch(train, config, display="off")
    run = nb.launch(train, config, display="off")
    assert len(run.value["begun"]) == sum(EPOCHS)
    told = [event for event in nb.attach(run.paths.folder).events() if event.type == "note"]
    assert sum("its trainer begins anew" in event.text for event in told) == 2


def boosted(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    import lightgbm as lgb

    from nbtoolkit.integrations import boosting as nbb

    x, y = samples()
    rounds: list[int] = []
    params = {"objective": "regression", "min_data_in_leaf": 2, "num_iterations": 20}
    lgb.train(
        **nbb.lightgbm(ctx, params, callbacks=[lambda env: rounds.append(env.iteration)]),
        train_set=lgb.Dataset(x, y[:, 0]),
    )
    return {**keras(config, ctx), "rounds": len(rounds)}


@pytest.mark.skipif(find_spec("lightgbm") is None, reason="NOT TESTED: LightGBM is not installed")
def test_trainings_of_two_frameworks_both_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("keras") is None:
        pytest.skip("NOT TESTED: Keras is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    config = settings(tmp_path, keras, fails=True).with_overrides({"checkpoint.every_steps": 10})
    with pytest.raises(OSError, match="a disk that failed"):
        nb.launch(boosted, config, display="off")
    rest = nb.launch(boosted, config, display="off")
    assert rest.value["rounds"] <= 1  # LightGBM trains at least one tree
    assert [[*one] for one in rest.value["begun"]] == [[1, 2]]
