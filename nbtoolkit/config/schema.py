"""Define every setting of a run, checked and frozen, and load it from layers of YAML.

    defaults  <  config/env/<host>.yaml  <  the user's file  <  overrides

The text under a field is its documentation. `model` and `data` are the user's own; anywhere else
an unknown name or a wrong value is an error: its line, what is allowed, and the nearest name.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from nbtoolkit.config.aliases import canonical
from nbtoolkit.config.fields import (
    Above1,
    Below1,
    Count,
    CountFrom0,
    Devices,
    Free,
    FreeSection,
    NotNegative,
    OptimizerName,
    OutputFolder,
    Port,
    Positive,
    Seconds,
    Seed,
    Share,
    TaskName,
    Text,
)
from nbtoolkit.config.layers import Overrides, file_layer, merge, override_layer, shipped_folder
from nbtoolkit.config.validation import fields, mistakes, note_read, refuse_clashes
from nbtoolkit.config.yaml_source import Keys, Layer, dump, refuse
from nbtoolkit.errors import ConfigError

Auto = Literal["auto"]


class Section(BaseModel):
    """Base of all sections: frozen, unknown names refused, the text under a field is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    if not TYPE_CHECKING:  # else every name would be an attribute

        def __getattribute__(self, name):
            note_read(type(self).__name__, name)
            return super().__getattribute__(name)


class Optim(Section):
    """The optimizer and its schedule, as `nb.fit` builds them."""

    name: OptimizerName = "adamw"
    """The optimizer: one of torch's by its short name, or any class by its dotted one."""
    options: Free = FreeSection()
    """More arguments of the optimizer, by their own names (`betas`, `eps`, `nesterov`)."""
    lr: Positive = 1e-3
    """The peak learning rate, before `lr_rule`."""
    weight_decay: NotNegative = 0.01
    """Weight decay (decoupled for adamw)."""
    decay_all: bool = False
    """Whether biases and the weights of norms decay too."""
    momentum: Share = 0.9
    """Momentum of sgd; the others do not read it."""
    schedule: Literal["cosine", "linear", "constant", "one_cycle", "plateau"] = "cosine"
    """How the learning rate falls after the warm-up; all but `plateau` by the optimizer step."""
    warmup_ratio: Share = 0.05
    """Share of all steps in which the learning rate rises from 0 to its peak."""
    min_lr_ratio: Share = 0.0
    """Where cosine, linear, one_cycle and plateau end at the lowest, as a share of the peak."""
    plateau_patience: Count = 5
    """`plateau`: epochs without a better `checkpoint.monitor` after which the rate drops."""
    plateau_factor: Share = 0.1
    """`plateau`: what the rate is multiplied by when it drops."""
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    """With `train.batch_size_per_device`: how the rate grows with the number of devices."""


class Train(Section):
    """How long, and on how much at once."""

    epochs: Count = 10
    """Passes over the training data."""
    max_steps: Count | None = None
    """End after so many optimizer steps, if that is sooner; for profiling and smoke tests."""
    batch_size: Count = 128
    """Samples in one optimizer step, over all ranks and accumulation steps."""
    batch_size_per_device: Count | None = None
    """The other choice: samples of one rank in one step. `batch_size` then has no meaning."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """`auto`: by the device's compute capability (bf16 from sm_80, fp16 on a T4), fp32 on a CPU."""
    drop_last: bool = False
    """Leave out an epoch's last uneven step (false: it counts by exactly the samples it has)."""
    loss_reduction: Literal["auto", "batch"] = "auto"
    """`auto`: a mean, a sum or a weighted mean over samples, as the first batch shows; `batch`: a
    loss of whole batches (Dice, contrastive), which depends on the number of ranks."""
    max_grad_norm: Positive | None = None
    """Gradients with a larger norm are scaled down to this one."""
    gradient_accumulation_steps: Auto | Count = "auto"
    """Micro-batches in one optimizer step; `auto`: one."""
    num_workers: CountFrom0 = 0
    """DataLoader processes of each rank; data in memory as tensors or arrays needs none."""
    compile: bool = False
    """`torch.compile` the model: minutes at the start, faster steps after."""
    channels_last: bool = False
    """Images in memory by pixel, not by channel: faster convolutions on GPUs with tensor cores."""
    activation_checkpointing: bool = False
    """Compute activations anew in the backward pass instead of keeping them: less memory."""
    fp16_weights: Literal["refuse", "upcast"] = "refuse"
    """Trainable weights that come in half precision; `upcast`: make them fp32."""
    weight_averaging: Literal["none", "ema", "swa"] = "none"
    """Validate and keep averaged weights: exponential (every step), or the mean of late epochs."""
    ema_decay: Share = 0.999
    """`ema`: how much of the average stays in each step, after a warm-up of its own."""
    swa_start: Share = 0.75
    """`swa`: the share of all steps after which averaging begins."""
    swa_lr: Positive | None = None
    """`swa`: the constant learning rate while averaging; null: what the schedule says."""
    early_stopping_patience: Count | None = None
    """End after so many epochs without a better `checkpoint.monitor`; null: never early."""
    min_delta: NotNegative = 0.0
    """What counts as better, for `early_stopping_patience`: by more than this."""
    scaler_init_scale: Positive = 65536.0
    """First loss scale under fp16."""
    scaler_growth_interval: Count = 2000
    """Steps without overflow after which the loss scale under fp16 grows."""
    scaler_growth_factor: Above1 = 2.0
    """What the loss scale is multiplied by then."""
    scaler_backoff_factor: Below1 = 0.5
    """What the loss scale is multiplied by after an overflow."""


class Distributed(Section):
    """Ranks: how many, on which devices, and how they talk."""

    enabled: Auto | bool = "auto"
    """`auto`: with two or more usable, equal GPUs; true: on the CPU too; false: never."""
    strategy: Literal["auto", "single", "ddp"] = "auto"
    """One process, or DistributedDataParallel."""
    world_size: Auto | Count = "auto"
    """Ranks; `auto`: one for each usable device. `nb.launch(processes=...)` beats it."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How ranks talk; `auto`: nccl between GPUs, else gloo."""
    fallback: bool = True
    """When the ranks cannot form a group: go on with one process and say so (false: an error)."""
    device_ids: Devices | None = None
    """Only these devices, by their number; null: every usable one."""
    port: Auto | Port = "auto"
    """Where the ranks meet; `auto`: a free port for each launch."""
    timeout: Seconds = 1800.0
    """A rank gives up a collective after so long; longer than `runtime.hang_timeout`."""
    sync_batchnorm: bool = False
    """Batch-norm statistics over all ranks."""
    find_unused_parameters: bool = False
    """DDP looks for parameters without a gradient in every step."""
    broadcast_buffers: bool = True
    """DDP copies rank 0's buffers to all ranks before each forward pass."""
    gradient_as_bucket_view: bool = True
    """Gradients are views into DDP's buckets: one copy less in memory."""
    bucket_cap_mb: Positive = 25.0
    """Size of DDP's buckets in MiB."""
    static_graph: bool = False
    """The same parameters are used in every step; wrong results where that is not so."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Gradients travel compressed: faster over slow links, not exact."""
    powersgd_rank: Count = 1
    """`powersgd`: rank of the approximation; it begins after a tenth of the steps (or 1000)."""


class Checkpoint(Section):
    """What is written while training, to go on from and to predict with."""

    enabled: bool = True
    """Whether `nb.fit` writes checkpoints."""
    every_minutes: Positive | None = 10.0
    """Longest time between two checkpoints; null: not by time."""
    every_epochs: Count | None = None
    """Also after every so many epochs."""
    every_steps: Count | None = None
    """Also after every so many optimizer steps."""
    keep_last: Count = 2
    """How many of the newest stay (the best one stays too)."""
    monitor: Text | None = None
    """The reported metric that decides which is best; null: val_loss, or train_loss without one."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Which is best; `auto`: as its name says (`val_mae`: the lowest); see docs/search.md."""
    weights: Literal["best", "last"] = "best"
    """The epoch whose weights the model has at `nb.fit`'s end, and `load_into`, `nb.load_model` and
    `cv.models` take: the best one's, or the last one's."""


class Tracking(Section):
    """Who else is told about the run."""

    mlflow: bool = True
    """One MLflow run for each launch."""
    tensorboard: bool = False
    """TensorBoard files in the run's folder."""
    uri: Text | None = None
    """MLflow's tracking URI; null: an SQLite database in `runtime.output_dir`."""
    experiment: Text = "nbtoolkit"
    """MLflow's experiment."""
    log_every_n_steps: Count = 10
    """How often `nb.fit` logs the training loss, in optimizer steps."""
    device_metrics: bool = True
    """Memory and use of the devices, every few seconds."""
    record_samples: bool = False
    """`nb.fit` writes down which samples every optimizer step took (the run's `samples/`)."""


class Runtime(Section):
    """Where a run writes, and how long it may take."""

    output_dir: OutputFolder = "outputs"
    """Each run has a folder of its own in it; `{scratch}` is the host's large passing disk."""
    time_budget: Seconds | None = None
    """The run saves and ends with status `deadline` in time for this; null: no limit."""
    session_limit: Seconds | None = None
    """The same for the age of the host's session (of the container, by its own clock)."""
    shutdown_margin: Seconds = 60.0
    """How long before `session_limit` the run ends, for what is left to do in the notebook."""
    pack: Auto | bool = "auto"
    """A run that ends at its deadline packs `output_dir`; `auto`: on Kaggle and Colab."""
    hang_timeout: Seconds = 300.0
    """A rank that is silent and idle for so long while another waits for it is hung."""
    compare_ranks: bool = True
    """Warn when ranks train different models: at reports and at the end (torchrun: at reports)."""


class _Places(dict[Keys, str]):
    """Where settings were set; equal configurations may come from different places."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Places)


class Config(Section):
    """All settings of a run: made by :func:`load_config`, changed by :meth:`with_overrides`."""

    task: TaskName = "nbtoolkit.tasks.digits:train"
    """The training function where no cell passes one: papermill, panel, command line. A run's own
    `config.yaml` names the function that was passed; `__main__:train` where no file can name it."""
    seed: Seed = 0
    """Decides initial weights, sample order and everything else drawn at random."""
    model: Free = FreeSection()
    """The user's own: what the model is built from."""
    data: Free = FreeSection()
    """The user's own: what the data are made from."""
    optim: Optim = Optim()
    """The optimizer and its schedule."""
    train: Train = Train()
    """How long, and on how much at once."""
    distributed: Distributed = Distributed()
    """Ranks: how many, on which devices, and how they talk."""
    checkpoint: Checkpoint = Checkpoint()
    """What is written while training."""
    tracking: Tracking = Tracking()
    """Who else is told about the run."""
    runtime: Runtime = Runtime()
    """Where a run writes, and how long it may take."""
    _places: _Places = PrivateAttr(default_factory=_Places)

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        refuse_clashes(self)
        return self

    def with_overrides(self, overrides: Overrides) -> Config:
        """This configuration with some settings changed.

        Args:
            overrides: ``{"optim.lr": 3e-4}``, ``{"optim": {"lr": 3e-4}}`` or ``["optim.lr=3e-4"]``.

        Raises:
            ConfigError: a name is unknown or a value is not allowed; all mistakes at once.
        """
        mine = Layer(values=self.model_dump(exclude_unset=True), places=self._places)
        return _build([mine, override_layer(overrides)])

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain dicts and lists; ``Config.model_validate`` takes it back."""
        values = self.model_dump()
        if self.train.batch_size_per_device is not None:
            del values["train"]["batch_size"]  # has no meaning then, and both together are refused
        return values

    def to_yaml(self) -> str:
        """Every setting as a YAML text; :func:`load_config` reads it back to an equal Config."""
        return dump(self.to_dict())

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """What differs: dotted name -> (value here, value in ``other``), None where absent."""
        mine, theirs = _flat(self.to_dict()), _flat(other.to_dict())
        return {
            name: (mine.get(name), theirs.get(name))
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        }

    def place(self, name: str) -> str:
        """Where a setting was set: ``train.yaml:4``, or ``override 'optim.lr'``."""
        return self._places.get(tuple(name.split(".")), "set in Python")

    def __repr__(self) -> str:
        changed = self.differences(Config())
        return f"Config({', '.join(f'{name}={mine!r}' for name, (mine, _) in changed.items())})"

    __str__ = __repr__


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    env: str | None = "auto",
    overrides: Overrides | None = None,
) -> Config:
    """Make a Config: defaults < the host's overlay < your file < overrides.

    Args:
        path: a YAML or JSON file. A relative one is looked for in the working directory, then in
            its parents up to one with a ``pyproject.toml``, then among the files of this package.
            None: no file.
        env: which ``config/env/<env>.yaml`` lies under your file. ``"auto"``: the one for the host
            this process runs on; None: none.
        overrides: a dict of dotted names, or texts such as ``"optim.lr=3e-4"``.

    Raises:
        ConfigError: a file is missing or not readable, a name is unknown, or a value is not
            allowed; all mistakes at once, each with its file and line.
    """
    layers = [_overlay(env)] if env is not None else []
    layers += [file_layer(path)] if path is not None else []
    return _build([*layers, override_layer(overrides)])


ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str] | None
"""What is taken wherever a configuration is: a file's path and a dict of settings, too."""


def as_config(config: ConfigLike, processes: int | None = None) -> Config:
    """Make a Config of whatever the user has.

    Args:
        config: a Config, a path to a YAML file, a dict of settings, or None for the defaults.
        processes: beats ``distributed.world_size``.

    Raises:
        ConfigError: it is something else, or something in it is wrong.
    """
    if config is None or isinstance(config, (str, os.PathLike)):
        config = load_config(config)
    elif isinstance(config, Mapping):
        config = load_config(overrides=config)
    elif not isinstance(config, Config):
        raise ConfigError(
            f"{reprlib.repr(config)} is no configuration",
            allowed="a Config, a path to YAML, a dict of settings, or None for the defaults",
            do='pass {"optim.lr": 3e-4}, or nb.load_config(path, overrides=...)',
        )
    if processes is not None:
        config = config.with_overrides(
            {"distributed.world_size": processes, "distributed.enabled": processes > 1}
        )
    return config


def _overlay(env: str) -> Layer:
    kind = _this_host() if env == "auto" else env
    known = sorted(entry.stem for entry in (shipped_folder() / "env").glob("*.yaml"))
    try:
        return file_layer(f"config/env/{kind}.yaml")
    except ConfigError as error:
        if kind in known:
            raise
        allowed = ", ".join(["auto", "None", *known]) + ", or a file of your own in config/env"
        raise ConfigError(f"there is no host overlay {kind!r}", allowed=allowed) from error


def _this_host() -> str:
    from nbtoolkit.host import detect_host  # later in the data's way, and only for this

    kind = detect_host().kind
    return "local" if kind in ("jupyter", "script") else kind


def _build(layers: list[Layer]) -> Config:
    layer = merge(canonical(each, fields(Config)) for each in layers)
    try:
        config = Config.model_validate(layer.values)
    except ValidationError as error:
        refuse([*layer.mistakes, *mistakes(error, layer, Config)])
        raise  # not reached: there is a mistake for every validation error
    refuse(list(layer.mistakes))
    config._places.update(layer.places)
    return config


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
