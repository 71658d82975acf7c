"""Settings that the training function never reads get one warning, and no false one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbtoolkit as nb
from nbtoolkit.config import reads
from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.errors import SweepError
from nbtoolkit.run.events import EventReader

SAID = "settings without effect"


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process have asked for names, as cells of a notebook do."""
    monkeypatch.setattr(reads, "_names", set())


def own_loop(config: Any, ctx: Any) -> dict[str, float]:
    ctx.report({"val_loss": 1.0}, step=0)
    return {"val_loss": 1.0}


def reads_the_rate(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": config.optim.lr}


def dumps_all(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": config.to_dict()["optim"]["lr"]}


def dumps_a_section(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": dict(config.optim)["lr"]}


def reads_params(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": ctx.params["optim.lr"]}


def reads_any(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": float(sum(ctx.params.values()))}


def fits(config: Any, ctx: Any) -> dict[str, float]:
    x = torch.ones(8, 2)
    return nb.fit(ctx, config, nn.Linear(2, 1), (x, x[:, :1]), None, loss=F.mse_loss)


def fits_with_another_config(_: Any, ctx: Any) -> dict[str, float]:
    x = torch.ones(8, 2)
    config = {"train.epochs": 1, "checkpoint.enabled": False}
    data = (x, x[:, :1])
    return nb.fit(ctx, config, nn.Linear(2, 1), data, data, loss=F.mse_loss)


def settings(folder: Path, **more: Any) -> Config:
    file = folder / "train.yaml"
    file.write_text("optim:\n  name: sgd\n  lr: 0.5\n  lr_rule: none\ntrain: {max_grad_norm: 1}\n")
    own = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out"), **more}
    return load_config(file, env=None, overrides=own)


def warnings(folder: Path) -> list[str]:
    events = EventReader(folder / "events.jsonl").read()
    return [event.text for event in events if event.type == "note" and SAID in event.text]


def test_to_read_a_setting_has_no_effect() -> None:
    config = Config()
    assert config.optim.lr == config.to_dict()["optim"]["lr"]
    assert dict(config.optim)["name"] == "adamw"
    assert reads.names() == frozenset()


def captures(config: Config) -> Any:
    def train(_: Any, ctx: Any) -> dict[str, float]:
        return {"val_loss": config.optim.lr * config.optim.momentum}

    return train


SPACE = {"optim.lr": [1e-3, 0.1], "optim.momentum": [0.5, 0.8]}  # one of the rates is the default


def swept(train: Any, config: Config) -> Any:
    pytest.importorskip("optuna")
    sweep_config = {"study": {"metric": "val_loss", "sampler": "grid"}, "space": SPACE}
    return nb.sweep(train, config, sweep_config, display="off")


@pytest.mark.parametrize(
    "train", [reads_params, dumps_all, fits_with_another_config, captures(Config())]
)
def test_a_sweep_of_settings_that_are_read_says_nothing(tmp_path: Path, train: Any) -> None:
    config = settings(tmp_path, **{"train.epochs": 1, "checkpoint.enabled": False})
    assert warnings(swept(train, config).paths.folder) == []


def test_a_section_that_is_read_as_a_whole_is_not_named(tmp_path: Path) -> None:
    result = swept(dumps_a_section, settings(tmp_path))
    assert warnings(result.paths.folder) == []


def test_a_sweep_names_what_it_searches_in_vain_once(tmp_path: Path) -> None:
    result = swept(own_loop, settings(tmp_path))
    assert len(result.study.get_trials()) == 4
    (text,) = warnings(result.paths.folder)
    assert "optim.lr (override 'optim.lr')" in text
    assert "optim.momentum (override 'optim.momentum')" in text
    assert "Do now:  correct the names, read them (config.optim.lr)" in text
    assert "max_grad_norm" not in text
    assert all(warnings(folder) == [] for folder in result.paths.folder.glob("trials/*"))


def test_a_sweep_names_only_the_one_that_is_not_read(tmp_path: Path) -> None:
    (text,) = warnings(swept(reads_the_rate, settings(tmp_path)).paths.folder)
    assert "optim.momentum (" in text
    assert "optim.lr (" not in text


def test_reading_is_noted_only_inside_the_block() -> None:
    config = Config()
    with reads.noting(config, ["optim.lr", "train.batch_size"]):
        assert config.optim.lr == 1e-3
        assert config.with_overrides({"optim.lr": 0.5}).optim.lr == 0.5
    assert reads.names() == {"optim.lr"}
    assert config == Config()
    assert type(config.optim).__dict__.get("lr") is None


def builds_a_model(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": 1 / config.model.hidden}


def other_name(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": float(config.model.get("hiden", 64))}


@pytest.mark.parametrize(
    ("train", "name"),
    [
        (own_loop, "model.hidden"),
        (other_name, "model.hidden"),
        (builds_a_model, None),
        (reads_any, None),
    ],
)
def test_a_sweep_over_a_name_that_the_first_trial_never_read_ends_there(
    tmp_path: Path, train: Any, name: str | None
) -> None:
    pytest.importorskip("optuna")
    config = Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    )
    space = {name or "model.hidden": [0.125, 0.25]}
    sweep_config = {"study": {"metric": "val_loss", "sampler": "grid"}, "space": space}
    if name is None:
        result = nb.sweep(train, config, sweep_config, display="off")
        assert warnings(result.paths.folder) == []
        return
    what = rf"the space has {name}, and the first trial has ended without reading it[\s\S]*`when`"
    with pytest.raises(SweepError, match=what):
        nb.sweep(train, config, sweep_config, display="off")


# --- names of the user's own ---


def reads_model(config: Any, ctx: Any) -> dict[str, float]:
    block = config.model.block
    values = [config.model.get("hidden", 64), block["kernel"], *config.data.augment.values()]
    return {"val_loss": float(sum(values))}


def passes_on(config: Any, ctx: Any) -> dict[str, float]:
    return {"val_loss": float(len({**config.model, **config.data.to_dict()}))}


def fits_a_model(config: Any, ctx: Any) -> dict[str, float]:
    config.model.get("hidden", 64)
    return fits(config, ctx)


def loads(config: Any, ctx: Any) -> dict[str, float]:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index * int(config.data.factor)

    loader = torch.utils.data.DataLoader(Rows(), num_workers=1)
    return {"val_loss": float(sum(map(int, loader)) + config.model.get("hidden", 1))}


OWN = {
    "model": {"hiden": 32, "block": {"kernel": 3, "stride": 2}},
    "data": {"augment": {"flip": 1}},
}


def own_names(folder: Path, **more: Any) -> Config:
    quiet = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out")}
    return load_config(env=None, overrides={**quiet, **(more or OWN)})


@pytest.mark.parametrize(("start", "ranks"), [("forkserver", 1), ("forkserver", 2), ("inline", 1)])
def test_a_name_below_model_that_nobody_read_is_named_with_the_one_that_was_asked_for(
    tmp_path: Path, start: Any, ranks: int
) -> None:
    config = own_names(tmp_path)
    result = nb.launch(reads_model, config, start=start, processes=ranks, display="off")
    (text,) = warnings(result.paths.folder)
    assert "model.hiden (override 'model'): did you mean model.hidden?" in text
    assert "model.block.stride (override 'model')" in text
    for other in ("kernel", "augment"):
        assert other not in text


def test_it_is_named_beside_nb_fit_too(tmp_path: Path) -> None:
    config = own_names(tmp_path).with_overrides({"train.epochs": 1, "checkpoint.enabled": False})
    result = nb.launch(fits_a_model, config, start="inline", display="off")
    (text,) = warnings(result.paths.folder)
    assert "model.hiden (override 'model'): did you mean model.hidden?" in text
    assert "data.augment.flip" in text


def test_sections_that_are_passed_on_are_read(tmp_path: Path) -> None:
    result = nb.launch(passes_on, own_names(tmp_path), start="inline", display="off")
    assert warnings(result.paths.folder) == []


def test_what_the_notebook_read_before_the_launch_is_read(tmp_path: Path) -> None:
    config = own_names(tmp_path, **{"data.folder_of_csv": "here", "model.hidden_size": 3})
    assert config.data.folder_of_csv == "here"
    config = config.with_overrides({"seed": 2})
    result = nb.launch(own_loop, config, processes=1, display="off")
    (text,) = warnings(result.paths.folder)
    assert "model.hidden_size" in text
    assert "data.folder_of_csv" not in text


def test_what_workers_of_a_loader_may_have_read_is_named_only_if_it_is_misspelt(
    tmp_path: Path,
) -> None:
    config = own_names(tmp_path, **{"data.factor": 2, "model.hiden": 3, "model.other": 1})
    result = nb.launch(loads, config, processes=1, display="off")
    (text,) = warnings(result.paths.folder)
    assert "model.hiden (override 'model.hiden'): did you mean model.hidden?" in text
    assert "data.factor" not in text
    assert "model.other" not in text


def test_places_change_no_configuration(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert config.place("optim.lr").endswith("train.yaml:3")
    changed = config.with_overrides({"train.epochs": 2})
    assert changed.place("optim.lr").endswith("train.yaml:3")
    assert changed.place("train.epochs") == "override 'train.epochs'"
    assert Config().place("optim.lr") == "the default"
    assert Config(seed=1).place("seed") == "set in Python"
    assert pickle.loads(pickle.dumps(config)).place("optim.lr").endswith("train.yaml:3")
    same = Config().with_overrides(config.model_dump(exclude_unset=True))
    assert same == config
    assert hash(same) == hash(config)
