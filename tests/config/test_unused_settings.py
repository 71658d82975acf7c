"""A custom loop that never reads a setting of nb.fit gets one warning, and no false one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbtoolkit as nb
from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.run.events import EventReader

SAID = "settings without effect"


def own_loop(config: Any, ctx: Any) -> dict[str, float]:
    ctx.report({"val_loss": 1.0}, step=0)
    return {"val_loss": 1.0}


def reads_the_rate(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": config.optim.lr}


def dumps_all(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": config.to_dict()["optim"]["lr"]}


def dumps_a_section(config: Any, ctx: Any) -> dict[str, float]:
    return dict(config.optim)


def reads_params(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": ctx.params["optim.lr"]}


def reads_any(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": float(sum(ctx.params.values()))}


def fits(config: Any, ctx: Any) -> dict[str, float]:
    x = torch.ones(8, 2)
    return nb.fit(ctx, config, nn.Linear(2, 1), (x, x[:, :1]), None, loss=F.mse_loss)


def fits_with_another_config(config: Any, ctx: Any) -> dict[str, float]:
    return fits({"train.epochs": 1, "checkpoint.enabled": False}, ctx)


def settings(folder: Path, **more: Any) -> Config:
    file = folder / "train.yaml"
    file.write_text("optim:\n  name: sgd\n  lr: 0.5\n  lr_rule: none\ntrain: {max_grad_norm: 1}\n")
    own = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out"), **more}
    return load_config(file, env=None, overrides=own)


def warnings(folder: Path) -> list[str]:
    events = EventReader(folder / "events.jsonl").read()
    return [event.text for event in events if event.type == "note" and SAID in event.text]


@pytest.mark.parametrize(("start", "ranks"), [("forkserver", 1), ("forkserver", 2), ("inline", 1)])
def test_settings_that_an_own_loop_does_not_read_are_named_once(
    tmp_path: Path, start: Any, ranks: int
) -> None:
    config = settings(tmp_path, **{"checkpoint.every_epochs": 1})
    result = nb.launch(own_loop, config, start=start, processes=ranks, display="off")
    (text,) = warnings(result.paths.folder)
    assert "optim.name (" in text
    assert "train.yaml:3)" in text
    assert "train.max_grad_norm (" in text
    assert "train.yaml:5)" in text
    assert "checkpoint.every_epochs (override 'checkpoint.every_epochs')" in text
    assert "Allowed: " in text
    assert "Do now:  read them in the function (config.optim.name), call nb.fit" in text
    # Nobody set these, and lr_rule, the output folder and mlflow have an effect on any function.
    for other in ("momentum", "lr_rule", "output_dir", "mlflow", "every_minutes"):
        assert other not in text


def test_a_setting_that_the_loop_reads_is_not_named(tmp_path: Path) -> None:
    result = nb.launch(reads_the_rate, settings(tmp_path), start="inline", display="off")
    (text,) = warnings(result.paths.folder)
    assert "optim.lr (" not in text
    assert "optim.name (" in text


@pytest.mark.parametrize("train", [dumps_all, fits, fits_with_another_config])
def test_nothing_is_said_where_all_settings_may_have_an_effect(tmp_path: Path, train: Any) -> None:
    config = settings(tmp_path, **{"train.epochs": 1, "checkpoint.enabled": False})
    result = nb.launch(train, config, start="inline", display="off")
    assert warnings(result.paths.folder) == []


def test_a_section_that_is_read_as_a_whole_is_not_named(tmp_path: Path) -> None:
    result = nb.launch(dumps_a_section, settings(tmp_path), start="inline", display="off")
    (text,) = warnings(result.paths.folder)
    assert "optim." not in text.partition("Allowed")[0]
    assert "train.max_grad_norm (" in text


def test_defaults_are_not_named(tmp_path: Path) -> None:
    config = Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path), "optim.lr": 1e-3}
    )
    result = nb.launch(own_loop, config, start="inline", display="off")
    assert warnings(result.paths.folder) == []


def captures(config: Config) -> Any:
    def train(_: Any, ctx: Any) -> float:
        return config.optim.lr + (config.train.max_grad_norm or 0) + len(config.optim.name)

    return train


def test_a_captured_config_counts_as_read(tmp_path: Path) -> None:
    config = settings(tmp_path)
    for start in ("forkserver", "inline"):
        result = nb.launch(captures(config), config, processes=1, start=start, display="off")
        assert warnings(result.paths.folder) == []


SPACE = {"optim.lr": [1e-3, 0.1], "optim.momentum": [0.5, 0.8]}  # one of the rates is the default


def test_a_sweep_names_them_once_for_all_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    sweep_config = {"study": {"metric": "val_loss", "sampler": "grid"}, "space": SPACE}
    result = nb.sweep(reads_params, settings(tmp_path), sweep_config, display="off")
    assert len(result.study.get_trials()) == 4
    (text,) = warnings(result.paths.folder)
    assert "train.max_grad_norm (" in text
    assert "optim.lr (" not in text  # the function takes it out of ctx.params
    assert all(warnings(folder) == [] for folder in result.paths.folder.glob("trials/*"))


def test_a_sweep_names_what_it_searches_in_vain(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    sweep_config = {"study": {"metric": "val_loss", "sampler": "grid"}, "space": SPACE}
    result = nb.sweep(own_loop, settings(tmp_path), sweep_config, display="off")
    (text,) = warnings(result.paths.folder)
    assert "optim.lr (override 'optim.lr')" in text
    assert "optim.momentum (override 'optim.momentum')" in text


def builds_a_model(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": 1 / config.model.hidden}


@pytest.mark.parametrize(("train", "count"), [(own_loop, 1), (builds_a_model, 0), (reads_any, 0)])
def test_a_sweep_names_a_setting_of_the_model_that_no_trial_reads(
    tmp_path: Path, train: Any, count: int
) -> None:
    pytest.importorskip("optuna")
    config = Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    )
    study = {"metric": "val_loss", "sampler": "grid"}
    sweep_config = {"study": study, "space": {"model.hidden": [8, 16]}}
    result = nb.sweep(train, config, sweep_config, display="off")
    texts = warnings(result.paths.folder)
    assert len(texts) == count  # of both trials together
    assert all("model.hidden (override 'model.hidden')" in text for text in texts)


def test_places_change_no_configuration(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert config.place("optim.lr").endswith("train.yaml:3")
    changed = config.with_overrides({"train.epochs": 2})
    assert changed.place("optim.lr").endswith("train.yaml:3")
    assert changed.place("train.epochs") == "override 'train.epochs'"
    assert Config().place("optim.lr") == "set in Python"
    assert pickle.loads(pickle.dumps(config)).place("optim.lr").endswith("train.yaml:3")
    same = Config().with_overrides(config.model_dump(exclude_unset=True))
    assert same == config
    assert hash(same) == hash(config)
