from __future__ import annotations

import copy
import json
import os
import pickle
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbtoolkit.config.fields import allowed_values
from nbtoolkit.config.schema import Config, as_config, load_config
from nbtoolkit.errors import ConfigError
from nbtoolkit.host import detect_host

ROOT = Path(__file__).resolve().parents[2]
Write = Callable[[str], Path]

# What config/train.yaml sets beside the defaults.
DIGITS = {
    "model.kind": ("mlp", None),
    "model.hidden": (256, None),
    "optim.lr": (0.01, 0.001),
    "train.epochs": (30, 10),
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a text to my.yaml in an otherwise empty working directory."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return path

    return write


# Layers


def test_later_layers_win(write: Write) -> None:
    path = write("optim: {lr: 0.1, name: sgd}\nruntime: {time_budget: 2h}\nmodel: {a: 1, b: 2}")
    config = load_config(path, env="kaggle", overrides={"optim.lr": 0.2, "model.b": 3})
    assert (config.optim.lr, config.optim.name) == (0.2, "sgd")
    assert config.runtime.time_budget == 7200
    assert config.model.to_dict() == {"a": 1, "b": 3}
    assert config.optim.weight_decay == Config().optim.weight_decay


def test_the_hosts_overlay_holds_where_the_shipped_file_is_silent() -> None:
    config = load_config(ROOT / "config/train.yaml", env="kaggle")
    assert config.differences(Config()) == {
        **DIGITS,
        "runtime.session_limit": (43200.0, None),
        "runtime.shutdown_margin": (900.0, 60.0),
    }
    assert load_config(env="colab").checkpoint.every_minutes == 5


def test_the_shipped_file_says_what_the_defaults_are_but_for_what_digits_need() -> None:
    shipped = load_config(ROOT / "config/train.yaml", env="local")
    assert shipped.differences(Config()) == DIGITS


def test_the_output_folder_may_lie_on_the_hosts_scratch_disk() -> None:
    config = load_config(overrides={"runtime.output_dir": "{scratch}/outputs"})
    assert config.runtime.output_dir == f"{detect_host().scratch}/outputs"


def test_auto_takes_the_overlay_of_this_host() -> None:
    kind = detect_host().kind
    assert load_config() == load_config(env={"jupyter": "local", "script": "local"}.get(kind, kind))


def test_an_overlay_of_ones_own_is_found(write: Write, tmp_path: Path) -> None:
    write("")
    (tmp_path / "config/env").mkdir(parents=True)
    (tmp_path / "config/env/cluster.yaml").write_text("seed: 7")
    assert load_config(env="cluster").seed == 7


def test_an_unknown_host_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no host overlay 'kagle'\n.*colab, kaggle, local, slurm"
    ):
        load_config(env="kagle")


@pytest.mark.parametrize(
    "overrides",
    [
        {"optim.lr": 3e-4, "model.depth": 2},
        {"optim": {"lr": 3e-4}, "model": {"depth": 2}},
        {"optim.lr": np.float64(3e-4), "model.depth": np.int64(2)},
        ["optim.lr=3e-4", "model.depth=2"],
        ("optim.lr = 3e-4", "model={depth: 2}"),
    ],
)
def test_overrides_are_a_dict_or_texts(overrides: Any) -> None:
    config = load_config(env=None, overrides=overrides)
    assert config.differences(Config()) == {
        "optim.lr": (3e-4, 1e-3),
        "model.depth": (2, None),
    }
    assert type(config.model.depth) is int


def test_one_text_is_one_override() -> None:
    assert Config().with_overrides("seed=3").seed == 3


def test_with_overrides_makes_a_new_config() -> None:
    config = load_config(env=None, overrides={"model.depth": 2})
    changed = config.with_overrides({"model.width": 8, "train.epochs": 1})
    assert changed.model.to_dict() == {"depth": 2, "width": 8}
    assert (changed.train.epochs, config.train.epochs) == (1, 10)


def test_a_later_layer_replaces_the_other_way_to_say_the_batch(write: Write) -> None:
    path = write("train: {batch_size: 64}")
    config = load_config(path, env=None, overrides={"train.batch_size_per_device": 16})
    assert config.train.batch_size_per_device == 16
    again = config.with_overrides({"train.batch_size": 32})
    assert (again.train.batch_size, again.train.batch_size_per_device) == (32, None)


def test_a_file_may_have_dotted_names(write: Write) -> None:
    config = load_config(write("train.epochs: 3\noptim.lr: 0.5\noptim: {name: sgd}"), env=None)
    assert (config.train.epochs, config.optim.lr, config.optim.name) == (3, 0.5, "sgd")
    assert config.place("optim.lr") == "my.yaml:2"
    with pytest.raises(ConfigError, match=r"my.yaml:1: unknown setting 'train.epoch'"):
        load_config(write("train.epoch: 3"), env=None)


# Files


def test_a_relative_path_is_looked_for_upwards_then_in_the_package(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("seed: 5")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert load_config("my.yaml", env=None).seed == 5
    assert load_config("config/train.yaml", env=None).differences(Config()) == DIGITS
    (below / "my.yaml").write_text("seed: 6")
    assert load_config("my.yaml", env=None).seed == 6


def test_the_search_ends_at_a_pyproject(write: Write, tmp_path: Path) -> None:
    write("seed: 5")
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        with pytest.raises(ConfigError, match=r"no configuration file 'my\.yaml'"):
            load_config("my.yaml", env=None)


def test_a_missing_file_is_told_with_a_similar_one(write: Write, tmp_path: Path) -> None:
    write("")
    with pytest.raises(
        ConfigError, match=rf"a file in one of {tmp_path}\n.*did you mean 'my.yaml'"
    ):
        load_config("mi.yaml", env=None)


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text('{\n\t"optim": {"lr": 1e-5},\n\t"model": {"name": "\\ud83d\\ude00"}\n}')
    config = load_config(path, env=None)
    assert (config.optim.lr, config.model.name) == (1e-5, "😀")


# What a Config is


def test_it_goes_to_yaml_and_back(tmp_path: Path) -> None:
    model = {"odd": ["1e-3", 1e-5, "no", "010", None, True, {"x": []}], "text": "a: b # c"}
    ranks = {"device_ids": [0, 2], "timeout": "1h", "port": 29500}
    train = {"batch_size_per_device": 8, "max_grad_norm": 1}
    overrides = {"model": model, "distributed": ranks, "train": train}
    config = load_config(env="kaggle", overrides=overrides)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path, env=None) == config
    assert Config.model_validate(json.loads(json.dumps(config.to_dict()))) == config


def test_arguments_of_the_optimizer_come_from_files_and_overrides(write: Write) -> None:
    path = write("optim:\n  name: torch.optim.NAdam\n  options:\n    eps: 1e-6\n    betas: [1, 1]")
    config = load_config(path, env=None, overrides=["optim.options.betas=[0.9, 0.95]"])
    assert dict(config.optim.options) == {"eps": 1e-6, "betas": (0.9, 0.95)}
    path.write_text(config.to_yaml())
    assert load_config(path, env=None) == config
    assert load_config(write("optim: {options: }"), env=None) == Config()


def test_it_is_frozen_hashable_and_travels() -> None:
    config = load_config(env=None, overrides={"model": {"layers": [1, {"a": 2}]}})
    for section in (config, config.optim, config.model):
        with pytest.raises((ConfigError, AttributeError), match="frozen"):
            section.lr = 3
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert len({config, copy.copy(config)}) == 1


def test_it_shows_what_differs_from_the_defaults() -> None:
    config = load_config(env=None, overrides={"optim.lr": 0.5, "model.depth": 2})
    assert repr(config) == "Config(model.depth=2, optim.lr=0.5)"
    assert repr(Config()) == "Config()"


def test_free_sections_are_read_like_objects_and_like_dicts() -> None:
    model = load_config(env=None, overrides={"model": {"net": {"width": 8}, "get": 1}}).model
    assert model.net.width == model["net"]["width"] == 8
    assert "net" in model
    assert (model.get("depth", 3), model["get"], list(model)) == (3, 1, ["net", "get"])
    assert {**model.net} == {"width": 8}
    with pytest.raises(AttributeError, match="no setting 'nett' in this section; it has: net, get"):
        _ = model.nett


def test_every_setting_is_documented_and_says_what_it_allows() -> None:
    for name, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        for key, one in {name: field, **inner}.items():
            assert one.description, f"{name}.{key} has no text under it"
    assert allowed_values(Config)["distributed.enabled"] == "auto, true or false"
    assert allowed_values(Config)["runtime.time_budget"].endswith(
        "such as 90s, 30m or 1h30m, or null"
    )


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # names
        (
            "optim:\n  lrr: 1",
            r"my.yaml:2: unknown setting 'optim.lrr'\n.*lr, .*\n.*did you mean 'optim.lr'",
        ),
        ("lr: 1", r"my.yaml:1: unknown setting 'lr'(.|\n)*did you mean 'optim.lr'"),
        ("train: {lr: 1}", r"unknown setting 'train.lr'(.|\n)*did you mean 'optim.lr'"),
        ("\n\ntrian: {}", r"my.yaml:3: unknown setting 'trian'(.|\n)*did you mean 'train'"),
        ("train: {sync_bm: 1}", r"did you mean 'distributed.sync_batchnorm'"),
        (
            "hidden: 3",
            r"unknown setting 'hidden'(.|\n)*put your own settings under model: or data:",
        ),
        # values
        (
            "train: {epochs: many}",
            r"my.yaml:1: train.epochs: 'many' is not allowed\n.*a whole number.*\n.*default: 10",
        ),
        ("train: {epochs: 0}", r"train.epochs: 0 is not allowed\n.*at least 1"),
        ("train: {epochs: true}", r"train.epochs: True is not allowed"),
        ("train: {epochs: 1.5}", r"train.epochs: 1.5 is not allowed"),
        ("optim: {lr: -1}", r"optim.lr: -1 is not allowed\n.*above 0"),
        ("optim: {lr: .nan}", r"optim.lr: nan is not allowed"),
        (
            "optim: {lr: auto}",
            r"optim.lr: 'auto' is not allowed\n.*above 0\n.*nb.find_learning_rate\(.*nothing",
        ),
        (
            "train: {num_workers: auto}",
            r"train.num_workers: 'auto' is not allowed\n.*number.*\n.*nb.compare\(",
        ),
        ("optim: {lr: .inf}", r"optim.lr: inf is not allowed"),
        (
            "optim: {options: 5}",
            r"5 is not allowed: .*\n.*strings.*\n.*default: \{\}",
        ),
        ("optim: {betas: [1, 2]}", r"setting 'optim.betas'(.|\n)*mean 'optim.options.betas'"),
        ("nesterov: true", r"setting 'nesterov'(.|\n)*did you mean 'optim.options.nesterov'"),
        # It begins like "tracking.torch_compile", and ends otherwise.
        ("tracking: {record_samples: 1}", r"'tracking.record_samples'(.|\n)*put your own settings"),
        ("optim: {warmup_ratio: 5}", r"optim.warmup_ratio: 5 is not allowed\n.*from 0 to 1"),
        (
            "optim: {name: lion}",
            r"optim.name: 'lion' is not allowed\n.*sgd, rmsprop, or",
        ),
        ("train: {precision: fp8}", r"'fp8' is not allowed\n.*auto, fp32, fp16 or bf16"),
        ("distributed: {enabled: 2}", r"enabled: 2 is not allowed\n.*auto, true or false"),
        (
            "distributed: {world_size: 0}",
            r"world_size: 0 is not allowed\n.*auto, or a whole number",
        ),
        ("distributed: {port: 80}", r"port: 80 is not allowed\n.*from 1024 to 65535"),
        (
            "distributed: {device_ids: [0, 0]}",
            r"\[0, 0\] is not allowed: .*\n.*distinct",
        ),
        ("distributed: {device_ids: [-1]}", r"device_ids: \[-1\] is not allowed"),
        ("distributed: {device_ids: []}", r"device_ids: \[\] is not allowed"),
        (
            "distributed: {timeout: soon}",
            r"'soon' is not allowed: .*\n.*90s, 30m or 1h30m",
        ),
        ("seed: -1", r"my.yaml:1: seed: -1 is not allowed\n.*from 0 to 4294967295"),
        ("task: train", r"task: 'train' is not allowed\n.*package.module:function"),
        (
            "optim: {param_groups: [{match: head, lr: 1, lr_scale: 2}]}",
            r"param_groups: .* is not allowed: the group 'head' has both lr and lr_scale",
        ),
        ("runtime: {output_dir: ''}", r"output_dir: '' is not allowed\n.*a string"),
        # shapes
        ("- 1", r"my.yaml:1: not a mapping of settings"),
        ("just words", r"my.yaml:1: not a mapping of settings"),
        ("train: 5", r"my.yaml:1: 'train' is a section, not 5"),
        ("model: 5", r"my.yaml:1: 'model' is a section, not 5"),
        # what only two settings together can show
        (
            "train:\n  batch_size: 4\n  batch_size_per_device: 2",
            r"my.yaml:2 and .*my.yaml:3: .*both set\n.*set one of them",
        ),
        ("optim: {lr_rule: linear}", r"my.yaml:1: optim.lr_rule has no effect"),
        (
            "distributed: {enabled: false, world_size: 2}",
            r"world_size: 2 conflicts with distributed.enabled: false\n.*remove one of them",
        ),
        (
            "distributed: {strategy: single, world_size: 2}",
            r"world_size: 2 conflicts with distributed.strategy: single",
        ),
        (
            "distributed: {strategy: dp, world_size: 2}",
            r"world_size: 2 conflicts with distributed.strategy: dp",
        ),
        (
            "distributed: {strategy: dp}\ntrain: {compile: true}",
            r"strategy: dp conflicts with train.compile",
        ),
        (
            "distributed: {strategy: ddp, enabled: false}",
            r"strategy: ddp conflicts with distributed.enabled: false",
        ),
        (
            "distributed: {device_ids: [1], world_size: 2}",
            r"2 ranks on 1 device_ids\n.*name one device per rank",
        ),
        ("distributed: {timeout: 5m}", r"timeout \(300 s\) is not above hang_timeout \(300 s\)"),
    ],
)
def test_a_mistake_is_shown_where_it_stands(write: Write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(text), env=None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lr"], r"override 'optim.lr': has no '='\n.*write \"optim.lr=3e-4\""),
        (["optim.lr={"], r"override 'optim.lr={': the value '{' is not YAML"),
        (["optim..lr=1"], r"override 'optim..lr=1': is not a dotted name"),
        (["optim.lr=fast"], r"override 'optim.lr=fast': optim.lr: 'fast' is not allowed"),
        ({"optim.lr": "fast"}, r"override 'optim.lr': optim.lr: 'fast' is not allowed"),
        ({3: 1}, r"override 3: is not a dotted name"),
        ({"train": {"epoch": 1}}, r"override 'train': unknown setting 'train.epoch'"),
        ({"optim.lr.x": 1}, r"override 'optim.lr.x': optim.lr: {'x': 1} is not allowed"),
        ({"model.f": len}, r"override 'model.f': model: 'model.f' is a builtin_function_or_method"),
        ({"model": {"a": {"b": [{1, 2}]}}}, r"model: 'model.a.b.0' is a set"),
        ({"model.a": 1, "model.a.b": 2}, r"'a' is both a value and a section"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(env=None, overrides=overrides)


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(write: Write) -> None:
    path = write("seed: x\ntrain:\n  epoch: 3\n  rank: 0\nmodel: {a: 1, a: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, env=None, overrides={"optim.lr": 0})
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 mistakes in the configuration:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        "my.yaml:1",
        "my.yaml:3",
        "my.yaml:4",
        "my.yaml:5",
        "override 'optim.lr'",
    ]


def _typos(name: str) -> list[str]:
    """The name with one letter lost, doubled, swapped or replaced, where chance decides."""
    chance = random.Random(name)
    i = chance.randrange(1, len(name) - 1)
    other = chance.choice([letter for letter in string.ascii_lowercase if letter != name[i]])
    return [
        name[:i] + name[i + 1 :],
        name[:i] + name[i] + name[i:],
        name[: i - 1] + name[i] + name[i - 1] + name[i + 1 :],
        name[:i] + other + name[i + 1 :],
    ]


@pytest.mark.parametrize(
    "name", [name for name in allowed_values(Config) if len(name.split(".")[-1]) > 3]
)
def test_a_typo_is_answered_with_the_name(name: str) -> None:
    section, _, key = name.rpartition(".")
    for typo in _typos(key):
        wrong = f"{section}.{typo}".lstrip(".")
        if wrong == name:
            continue
        with pytest.raises(ConfigError, match=rf"unknown setting '{wrong}'(.|\n)*'{name}'\?"):
            load_config(env=None, overrides={wrong: 1})


def test_a_path_is_taken_wherever_a_path_is_meant(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with os.scandir(tmp_path) as entries:
        (entry,) = entries  # an os.PathLike that is no pathlib.Path
    for path in (tmp_path / "folder", entry):
        overrides = {
            "runtime.output_dir": path,
            "tracking.uri": path,
            "data": {"root": path},
            "cluster.setup": [path],
        }
        config = load_config(env=None, overrides=overrides)
        text = os.fspath(path)
        assert config.runtime.output_dir == config.tracking.uri == config.data.root == text
        assert config.cluster.setup == (text,)
        assert load_config(env=None, overrides=config.to_dict()) == config
        assert Config.model_validate({"runtime": {"output_dir": path}}).runtime.output_dir == text
        assert as_config({"runtime.output_dir": path}).runtime.output_dir == text
