"""Trainers with validation, several of their own settings, and what comes back to the notebook."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied
from nbtoolkit.extras.integrations.support import last_checkpoint

pytestmark = [pytest.mark.timeout(900), pytest.mark.apart]


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    settings = {
        "runtime.output_dir": str(tmp_path / "out"),
        "tracking.mlflow": False,
        "train.epochs": 2,
        "train.batch_size": 32,
        "optim.lr": 0.01,
        "data": {"die_after": 0, "manual": False, "trainer": {}},
    }
    return nb.load_config(env=None, overrides=settings)


def reports(run: nb.RunResult) -> list[Any]:
    events = nb.attach(run.paths.folder).events()
    return [event for event in events if event.type == "report" and event.step is not None]


def logged(run: nb.RunResult) -> list[Any]:
    return [event for event in nb.attach(run.paths.folder).events() if event.type == "metrics"]


def die_once(config: nb.Config, ctx: nb.RunContext, step: int) -> None:
    """Kill rank 0 after ``data.die_after`` steps, once in a run."""
    died = ctx.paths.folder / "died"
    if 0 < config.data.die_after == step and ctx.is_main and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


# --- Lightning ---


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def line(config: nb.Config) -> Any:
    import lightning

    class Line(lightning.LightningModule):
        """Learn the sum of eight numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = torch.nn.Linear(8, 1), torch.nn.Linear(1, 1)
            self.automatic_optimization = not config.data.manual
            if not config.data.manual:
                del self.unused

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.layer(x), y)
            self.log("train_mse", loss, on_epoch=True, on_step=False)
            if self.automatic_optimization:
                return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.layer(x), y)
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), config.optim.lr)

    return Line()


def lightning_trains(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    import lightning

    from nbtoolkit.integrations import lightning as nbl

    class Dies(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            died = ctx.paths.folder / "died"
            after = config.data.die_after
            if after and trainer.global_step == after and ctx.is_main and not died.exists():
                died.touch()

                os.kill(os.getpid(), 9)

    arguments = nbl.trainer_arguments(
        ctx,
        callbacks=Dies(),
        max_epochs=config.train.epochs,
        log_every_n_steps=5,
        enable_model_summary=False,
        **dict(config.data.trainer),
    )
    trainer = lightning.Trainer(**arguments)
    module, size = line(config), ctx.plan.batch_size_per_device
    trainer.fit(
        module,
        DataLoader(points(256, 0), size, shuffle=True),
        None if config.data.manual else DataLoader(points(64, 1), size),
        ckpt_path=nbl.resume_from(ctx),
    )
    weights = float(sum(one.abs().sum() for one in module.parameters()))
    return {"weights": weights, "epochs": trainer.current_epoch}


def two_ranks(config: nb.Config, **more: Any) -> nb.Config:
    settings = {"distributed.world_size": 2, "distributed.enabled": True}
    return config.with_overrides({**settings, **more})


def test_lightning_reports_both_losses_of_an_epoch(config: nb.Config, tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    settings = {"tracking.mlflow": True, "tracking.uri": f"sqlite:///{database}"}
    run = nb.launch(lightning_trains, config.with_overrides(settings), display="off")
    assert [event.step for event in reports(run)] == [8, 16]
    assert [set(event.values) for event in reports(run)] == [{"train_mse", "val_loss"}] * 2
    assert reports(run)[1].values["val_loss"] < reports(run)[0].values["val_loss"]
    assert [event.step for event in logged(run)] == [5, 10, 15]
    assert set(logged(run)[0].values) == {"loss", "lr"}
    # Once, and without a logger of Lightning's.
    with sqlite3.connect(database) as tables:
        [[runs]] = tables.execute("select count(*) from runs").fetchall()
        values = tables.execute("select key, step from metrics").fetchall()
    assert runs == 1
    assert sorted(step for key, step in values if key == "val_loss") == [8, 16]
    # The model of the last checkpoint gives the last report's loss.
    state = torch.load(last_checkpoint(run), weights_only=False)["state_dict"]
    x, y = points(64, 1).tensors
    outputs = torch.nn.functional.linear(x, state["layer.weight"], state["layer.bias"])
    loss = torch.nn.functional.mse_loss(outputs, y).item()
    assert loss == pytest.approx(reports(run)[1].values["val_loss"], rel=1e-4)
    assert len(list(run.paths.checkpoints.glob("trainer-*.ckpt"))) == 2  # keep_last


@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_with_validation_resumes_with_the_next_epoch(
    config: nb.Config, ranks: int
) -> None:
    settings = config if ranks == 1 else two_ranks(config)
    settings = settings.with_overrides({"train.epochs": 3})
    whole = nb.launch(lightning_trains, settings, display="off")
    dies = settings.with_overrides({"data.die_after": 11})
    with pytest.raises(WorkerDied):
        nb.launch(lightning_trains, dies, display="off")
    resumed = nb.launch(lightning_trains, dies, display="off")
    assert [event.step for event in reports(resumed)] == [8, 16, 24]
    assert resumed.values == whole.values  # bit for bit, on both ranks
    longer = dies.with_overrides({"train.epochs": 4})
    longer_run = nb.launch(lightning_trains, longer, resume=resumed.paths.folder, display="off")
    assert [event.step for event in reports(longer_run)] == [8, 16, 24, 32]


def test_lightning_resumes_within_an_epoch_with_the_next_step(config: nb.Config) -> None:
    dies = config.with_overrides({"data.die_after": 5, "checkpoint.every_steps": 3})
    with pytest.raises(WorkerDied):
        nb.launch(lightning_trains, dies, display="off")
    resumed = nb.launch(lightning_trains, dies, display="off")
    assert [event.step for event in reports(resumed)] == [8, 16]
    saved = [e.step for e in nb.attach(resumed.paths.folder).events() if e.type == "checkpoint"]
    assert saved == [3, 6, 8, 9, 12, 15, 16]


def test_lightning_reports_a_validation_within_an_epoch(config: nb.Config) -> None:
    settings = {"data.trainer": {"val_check_interval": 0.5}, "train.epochs": 1}
    run = nb.launch(lightning_trains, config.with_overrides(settings), display="off")
    assert [event.step for event in reports(run)] == [4, 8]
    assert set(reports(run)[0].values) == {"val_loss"}
    assert set(reports(run)[1].values) == {"train_mse", "val_loss"}


def test_lightning_reports_only_epochs_that_are_validated(config: nb.Config) -> None:
    settings = {"data.trainer": {"check_val_every_n_epoch": 2}, "train.epochs": 4}
    run = nb.launch(lightning_trains, config.with_overrides(settings), display="off")
    assert [event.step for event in reports(run)] == [16, 32]


def test_lightning_with_manual_optimization_no_validation_and_an_unused_layer(
    config: nb.Config,
) -> None:
    settings = {"data.manual": True, "distributed.find_unused_parameters": True}
    run = nb.launch(lightning_trains, two_ranks(config, **settings), display="off")
    assert [event.step for event in reports(run)] == [8, 16]
    assert reports(run)[1].values["train_mse"] < reports(run)[0].values["train_mse"]
    assert last_checkpoint(run).name == "trainer-000000016.ckpt"


def test_no_checkpoint_is_written_with_checkpoint_enabled_false(config: nb.Config) -> None:
    run = nb.launch(
        lightning_trains, config.with_overrides({"checkpoint.enabled": False}), display="off"
    )
    assert [event.step for event in reports(run)] == [8, 16]
    assert list(run.paths.folder.rglob("*.ckpt")) == []


# --- Hugging Face ---


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Sequences that count upwards from a random number, modulo 50."""
    first = torch.randint(50, (count, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in (first + torch.arange(8)) % 50]


def transformers_trains(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    from transformers import Trainer, TrainerCallback

    from nbtoolkit.integrations import transformers as nbt

    class Dies(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            die_once(config, ctx, state.global_step)

    arguments = nbt.training_arguments(
        ctx,
        num_train_epochs=config.train.epochs,
        learning_rate=config.optim.lr,
        logging_steps=5,
        **{"eval_strategy": "epoch", **dict(config.data.trainer)},
    )
    assert arguments.report_to == ["nbtoolkit"]
    data = {"train_dataset": sentences(256, 0), "eval_dataset": sentences(64, 1)}
    trainer = Trainer(llama(), arguments, **data, callbacks=[Dies()])
    trainer.train(resume_from_checkpoint=nbt.resume_from(ctx))
    weights = float(sum(one.abs().sum() for one in trainer.model.parameters()))
    return {"weights": weights, "best": trainer.state.best_metric or 0.0}


def test_two_ranks_take_the_steps_of_one_in_transformers(config: nb.Config) -> None:
    from transformers import LlamaForCausalLM

    one = nb.launch(transformers_trains, config, display="off")
    two = nb.launch(transformers_trains, two_ranks(config), display="off")
    losses = [[event.values["eval_loss"] for event in reports(run)] for run in (one, two)]
    assert [event.step for event in reports(two)] == [8, 16]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][1] < 0.97 * losses[0][0]
    assert [event.step for event in logged(one)] == [5, 10, 15]
    model = LlamaForCausalLM.from_pretrained(last_checkpoint(one))
    rows = sentences(64, 1)
    loaded = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
    assert loaded.item() == pytest.approx(losses[0][1], rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers_resumes_exactly_within_an_epoch(config: nb.Config, ranks: int) -> None:
    settings = config if ranks == 1 else two_ranks(config)
    settings = settings.with_overrides({"checkpoint.every_steps": 3})
    whole = nb.launch(transformers_trains, settings, display="off")
    dies = settings.with_overrides({"data.die_after": 5})
    with pytest.raises(WorkerDied):
        nb.launch(transformers_trains, dies, display="off")
    resumed = nb.launch(transformers_trains, dies, display="off")
    assert [event.step for event in reports(resumed)] == [8, 16]
    assert [one["weights"] for one in resumed.values] == [one["weights"] for one in whole.values]


def test_transformers_keeps_its_best_model_and_saves_with_each_evaluation(
    config: nb.Config,
) -> None:
    own = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    run = nb.launch(
        transformers_trains, config.with_overrides({"data.trainer": own}), display="off"
    )
    assert [event.step for event in reports(run)] == [4, 8, 12, 16]
    assert run.value["best"] == min(event.values["eval_loss"] for event in reports(run))
    assert last_checkpoint(run).name == "checkpoint-16"


def transformers_with_own_arguments(config: nb.Config, ctx: nb.RunContext) -> None:
    from transformers import Trainer, TrainingArguments

    from nbtoolkit.integrations import transformers as nbt

    arguments = TrainingArguments(
        str(ctx.paths.checkpoints / "mine"),
        use_cpu=True,
        per_device_train_batch_size=32,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="best",
        metric_for_best_model="eval_loss",
        report_to="none",
        disable_tqdm=True,
    )
    data = {"train_dataset": sentences(256, 0), "eval_dataset": sentences(64, 1)}
    trainer = Trainer(llama(), arguments, **data, callbacks=[nbt.callback(ctx)])
    trainer.train(resume_from_checkpoint=nbt.resume_from(ctx))


def test_transformers_with_arguments_of_its_own(config: nb.Config) -> None:
    run = nb.launch(transformers_with_own_arguments, config, display="off")
    assert [event.step for event in reports(run)] == [8, 16]
    assert last_checkpoint(run).parent.name == "mine"
