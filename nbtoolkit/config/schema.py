"""Define the settings of a run, and load them from layers of YAML.

    defaults  <  config/env/<host>.yaml  <  the user's file  <  overrides

The string under a field is its documentation. The sections `model` and `data` are free; elsewhere
an unknown name or an invalid value is an error with its line, the allowed values and a suggestion.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import PrivateAttr, ValidationError, model_validator

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
    ParamGroups,
    Port,
    Positive,
    Seconds,
    Seed,
    Share,
    TaskName,
    Text,
)
from nbtoolkit.config.layers import Overrides, file_layer, merge, override_layer, shipped_folder
from nbtoolkit.config.section import Cluster, Section
from nbtoolkit.config.validation import check_conflicts, fields, mistakes
from nbtoolkit.config.yaml_source import Keys, Layer, dump, refuse
from nbtoolkit.errors import ConfigError

Auto = Literal["auto"]
_Number = TypeVar("_Number", int, float)


def measured(value: Auto | _Number, name: str) -> _Number:
    """Return the value of a setting that is measured when it is ``auto``.

    Raises:
        ConfigError: it is still ``auto``: nothing has measured it.
    """
    if isinstance(value, str):
        raise ConfigError(
            f"{name} is auto, and nothing has measured it: that happens before the ranks start",
            allowed="auto in a configuration that nb.launch, nb.sweep or nb.cross_validate gets "
            "in a notebook or a script; in a rank, also one of torchrun or Slurm, a number",
            do=f"set {name} to a number",
        )
    return value


class Optim(Section):
    """The optimizer and its schedule, as `nb.fit` builds them."""

    name: OptimizerName = "adamw"
    """The optimizer: a short name of one of torch's, or the dotted name of any class."""
    options: Free = FreeSection()
    """More arguments of the optimizer, with its own names (`betas`, `eps`, `nesterov`)."""
    param_groups: ParamGroups = ()
    """Groups of parameters with their own rate and decay: `match` (a pattern of names), and `lr` or
    `lr_scale`, `weight_decay` and other arguments of the optimizer."""
    lr: Auto | Positive = 1e-3
    """The peak learning rate, before `lr_rule`; `auto`: by `nb.find_learning_rate`."""
    weight_decay: NotNegative = 0.01
    """Weight decay (decoupled for adamw)."""
    decay_all: bool = False
    """Also decay biases and the weights of norms."""
    momentum: Share = 0.9
    """Momentum of sgd; other optimizers ignore it."""
    schedule: Literal["cosine", "linear", "constant", "one_cycle", "plateau", "range_test"] = (
        "cosine"
    )
    """How the learning rate falls after the warm-up; per step, `plateau` per epoch. `range_test`
    rises exponentially, as `nb.find_learning_rate` does."""
    warmup_ratio: Share = 0.05
    """Share of all steps over which the learning rate rises from 0 to its peak."""
    min_lr_ratio: Share = 0.0
    """Lowest rate of all schedules but constant, as a share of the peak (`range_test`: 0 means
    1e-6)."""
    plateau_patience: Count = 5
    """`plateau`: epochs without a better `checkpoint.monitor` before the rate drops."""
    plateau_factor: Share = 0.1
    """`plateau`: factor of the rate when it drops."""
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    """With `train.batch_size_per_device`: how the rate grows with the number of ranks."""


class Train(Section):
    """Length of the training, batch size, precision and averaging."""

    epochs: Count = 10
    """Passes over the training data."""
    max_steps: Count | None = None
    """End after this many optimizer steps, if sooner; for profiling and smoke tests."""
    batch_size: Count = 128
    """Samples per optimizer step, over all ranks and accumulation steps."""
    batch_size_per_device: Count | None = None
    """Alternative to `batch_size`: samples of one rank per forward pass."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """`auto`: by the device's compute capability (bf16 from sm_80, fp16 on a T4), fp32 on a CPU."""
    drop_last: bool = False
    """Skip an epoch's last incomplete step (false: weight it by its number of samples)."""
    sample_weights: Literal["balanced"] | None = None
    """`balanced`: draw the classes equally often, with replacement; null: each sample once."""
    loss_reduction: Literal["auto", "batch"] = "auto"
    """`auto`: a mean, a sum or a weighted mean over samples, detected in the first batch; `batch`:
    a loss over whole batches (Dice, contrastive), which depends on the number of ranks."""
    max_grad_norm: Positive | None = None
    """Scale gradients with a larger norm down to this norm; null: no clipping."""
    gradient_accumulation_steps: Auto | Count = "auto"
    """Micro-batches per optimizer step; `auto`: one, or as many as `nb.fit` needs to fit into the
    memory: if a rank runs out of it, the run starts again from its newest checkpoint, with about
    twice as many."""
    num_workers: Auto | CountFrom0 = 0
    """DataLoader processes of each rank; tensors and arrays in memory need none. `auto`: by
    `nb.find_num_workers`."""
    compile: bool = False
    """Compile the model with `torch.compile`: minutes at the start, faster steps."""
    profile: bool = False
    """Record a few optimizer steps with torch.profiler: a trace per rank and a table."""
    channels_last: bool = False
    """Use the channels-last memory format: faster convolutions on GPUs with tensor cores."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    fp16_weights: Literal["refuse", "upcast"] = "refuse"
    """Trainable weights in half precision: an error, or (`upcast`) converted to fp32."""
    weight_averaging: Literal["none", "ema", "swa"] = "none"
    """Validate and save averaged weights: exponential (every step), or the mean of late epochs."""
    ema_decay: Share = 0.999
    """`ema`: decay of the average per step, after its own warm-up."""
    swa_start: Share = 0.75
    """`swa`: share of all steps before averaging starts."""
    swa_lr: Positive | None = None
    """`swa`: constant learning rate while averaging; null: the schedule's."""
    early_stopping_patience: Count | None = None
    """End after this many epochs without a better `checkpoint.monitor`; null: never early."""
    min_delta: NotNegative = 0.0
    """Smallest improvement that counts for `early_stopping_patience`."""
    scaler_init_scale: Positive = 65536.0
    """Initial loss scale with fp16."""
    scaler_growth_interval: Count = 2000
    """Steps without overflow before the loss scale grows."""
    scaler_growth_factor: Above1 = 2.0
    """Factor of the loss scale when it grows."""
    scaler_backoff_factor: Below1 = 0.5
    """Factor of the loss scale after an overflow."""


class Distributed(Section):
    """Number of ranks, their devices, and how they communicate."""

    enabled: Auto | bool = "auto"
    """Use several ranks. `auto`: on two or more usable, equal GPUs; true: on the CPU too."""
    strategy: Literal[
        "auto", "single", "ddp", "fsdp", "deepspeed", "pipeline", "dp", "measured"
    ] = "auto"
    """One process, DistributedDataParallel, `fsdp`: sharded weights and optimizer state,
    `deepspeed`: the same by DeepSpeed's ZeRO, `pipeline`: the layers of an nn.Sequential divided
    over the ranks, or `dp`: DataParallel, one process on several GPUs. `auto`: by `nb.calibrate`,
    kept or made after a long run, else ddp; `measured`: measure it."""
    zero_stage: Literal[1, 2, 3] = 2
    """`deepspeed`: what each rank keeps a part of. 1: optimizer state; 2: gradients, too; 3:
    weights, too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """`deepspeed`: keep parts in CPU memory. `optimizer`: optimizer state and gradients, whose step
    then runs on the CPU; `all`: weights, too (stage 3)."""
    world_size: Auto | Count = "auto"
    """Ranks; `auto`: one per usable device. `nb.launch(processes=...)` overrides it."""
    backend: Literal["auto", "nccl", "gloo", "tensorflow"] = "auto"
    """Communication backend; `auto`: nccl between GPUs, else gloo. `tensorflow`: its own."""
    fallback: bool = True
    """If the ranks cannot form a group, continue with one process and report it (false: error)."""
    device_ids: Devices | None = None
    """Numbers of the devices to use; null: every usable one."""
    port: Auto | Port = "auto"
    """Port of the rendezvous; `auto`: a free port for each launch."""
    timeout: Seconds = 1800.0
    """Timeout of a collective; longer than `runtime.hang_timeout`."""
    sync_batchnorm: bool = False
    """Compute batch-norm statistics over all ranks."""
    find_unused_parameters: bool = False
    """DDP looks for parameters without a gradient in every step."""
    broadcast_buffers: bool = True
    """DDP copies rank 0's buffers to all ranks before each forward pass."""
    gradient_as_bucket_view: bool = True
    """Gradients are views into DDP's buckets: one copy less in memory."""
    bucket_cap_mb: Positive = 25.0
    """Size of DDP's buckets in MiB."""
    static_graph: bool = False
    """Every step uses the same parameters; results are wrong if that is not true."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of gradients between ranks: faster over slow links, not exact."""
    powersgd_rank: Count = 1
    """`powersgd`: rank of the approximation; it starts after a tenth of the steps (or 1000)."""
    local_sgd_steps: Count | None = None
    """Each rank trains alone, and the weights are averaged after so many optimizer steps (and after
    each epoch): for slow links, not exact; null: gradients are averaged in every step."""


class Checkpoint(Section):
    """Checkpoints, to resume from and to predict with."""

    enabled: bool = True
    """Let `nb.fit` write checkpoints."""
    every_minutes: Positive | None = 10.0
    """Longest time between two checkpoints, in minutes; null: no limit."""
    every_epochs: Count | None = None
    """Also write one every this many epochs."""
    every_steps: Count | None = None
    """Also write one every this many optimizer steps."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep (the best one is kept too)."""
    format: Literal["auto", "whole", "sharded"] = "auto"
    """`sharded`, with fsdp: each rank writes its part (torch 2.8 or newer); `whole`: rank 0 gathers
    and writes all; `auto`: sharded with fsdp from 1 GB on. Each loads under every strategy."""
    monitor: Text | None = None
    """Reported metric that decides which is best; null: val_loss. Without validation data, null is
    train_loss, which decides when to end early, and the last epoch's weights are kept."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Which values are best; `auto`: by the metric's name (`val_mae`: min); see docs/sweep.md."""
    weights: Literal["best", "last"] = "best"
    """The epoch whose weights the model has after `nb.fit`, and which `load_into`, `nb.load_model`
    and `cv.models` load."""


class Tracking(Section):
    """Tracking services and what is logged."""

    mlflow: bool = True
    """Write an MLflow run for each launch."""
    tensorboard: bool = False
    """Write TensorBoard files to the run's folder."""
    wandb: bool = False
    """Write W&B runs; offline, to the run's folder, where there is no key or no internet."""
    wandb_project: Text | None = None
    """Name of the W&B project; null: the same as `tracking.experiment`."""
    uri: Text | None = None
    """MLflow's tracking URI; null: an SQLite database in `runtime.output_dir`."""
    experiment: Text = "nbtoolkit"
    """Name of the MLflow experiment."""
    log_every_n_steps: Count = 10
    """How often `nb.fit` logs the training loss, in optimizer steps."""
    device_metrics: bool = True
    """Log memory and use of the devices every few seconds."""
    record_samples: bool = False
    """Let `nb.fit` record the samples of every optimizer step (the run's `samples/`)."""


class Runtime(Section):
    """Output folder, time limits and health checks."""

    output_dir: OutputFolder = "outputs"
    """Parent of the run folders; `{scratch}` is the host's large temporary folder."""
    time_budget: Seconds | None = None
    """Time limit of a run: before it, the run saves and ends with status `deadline`; null: none."""
    deadline: Seconds | None = None
    """Time limit of all calls of a process, counted from its start; see `nb.set_deadline`."""
    session_limit: Seconds | None = None
    """Limit of the host's session: the same, counted from the start of the container."""
    shutdown_margin: Seconds = 60.0
    """Time between the end of the run and `session_limit`, for the rest of the notebook."""
    pack: Auto | bool = "auto"
    """Pack `output_dir` when a run ends at its deadline; `auto`: on Kaggle and Colab."""
    quota_hours: Positive | None = None
    """GPU hours of your host's weekly quota, for `nb.quota` and the cost of a search; null: none.
    """
    hang_timeout: Seconds = 300.0
    """A rank is hung if it is silent and idle for so long while another waits or has returned."""
    standby_seconds: Auto | NotNegative = "auto"
    """After a run on the CPU, new ranks start in advance and wait this many seconds for the next
    launch of the same shape, which is then faster; 0: none do. `auto`: 600 in a notebook's kernel,
    else 0."""
    compare_ranks: bool = True
    """Warn when ranks train different models: at reports and at the end (torchrun: at reports)."""


class _Places(dict[Keys, str]):
    """Places where settings were set; all are equal, so that they do not affect equality."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Places)


class Config(Section):
    """All settings of a run; see :func:`load_config` and :meth:`with_overrides`."""

    task: TaskName = "nbtoolkit.tasks.digits:train"
    """The training function for papermill, panel and command line; a cell passes its own. A run's
    `config.yaml` names the function that ran; `__main__:train` if it was defined in a notebook."""
    seed: Seed = 0
    """Seed of initial weights, sample order and all other random numbers."""
    model: Free = FreeSection()
    """Your own settings of the model."""
    data: Free = FreeSection()
    """Your own settings of the data."""
    optim: Optim = Optim()
    """The optimizer and its schedule."""
    train: Train = Train()
    """Length of the training, batch size, precision and averaging."""
    distributed: Distributed = Distributed()
    """Number of ranks, their devices, and how they communicate."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints, to resume from and to predict with."""
    tracking: Tracking = Tracking()
    """Tracking services and what is logged."""
    runtime: Runtime = Runtime()
    """Output folder, time limits and health checks."""
    cluster: Cluster = Cluster()
    """The job of `where="slurm"` and `where="ray"`."""
    _places: _Places = PrivateAttr(default_factory=_Places)

    @model_validator(mode="after")
    def _check_conflicts(self) -> Config:
        check_conflicts(self)
        return self

    def with_overrides(self, overrides: Overrides) -> Config:
        """Return a copy with some settings changed.

        Args:
            overrides: ``{"optim.lr": 3e-4}``, ``{"optim": {"lr": 3e-4}}`` or ``["optim.lr=3e-4"]``.

        Raises:
            ConfigError: a name is unknown or a value is not allowed; lists all mistakes.
        """
        current = Layer(values=self.model_dump(exclude_unset=True), places=self._places)
        return _build([current, override_layer(overrides)])

    def to_dict(self) -> dict[str, Any]:
        """Convert all settings to plain dicts and lists, for ``Config.model_validate``."""
        values = self.model_dump()
        if self.train.batch_size_per_device is not None:
            # It has no effect then, and setting both is an error.
            del values["train"]["batch_size"]
        return values

    def to_yaml(self) -> str:
        """Write all settings as YAML; :func:`load_config` reads it back to an equal Config."""
        return dump(self.to_dict())

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Return what differs: dotted name -> (value here, value in ``other``); None if absent."""
        own, others = flat_settings(self.to_dict()), flat_settings(other.to_dict())
        return {
            name: (own.get(name), others.get(name))
            for name in {**own, **others}
            if own.get(name) != others.get(name)
        }

    def place(self, name: str) -> str:
        """Return where a setting was set: ``train.yaml:4``, or ``override 'optim.lr'``."""
        return self._places.get(tuple(name.split(".")), "set in Python")

    def __repr__(self) -> str:
        changed = self.differences(Config())
        return f"Config({', '.join(f'{name}={value!r}' for name, (value, _) in changed.items())})"

    __str__ = __repr__


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    env: str | None = "auto",
    overrides: Overrides | None = None,
) -> Config:
    """Load a Config from its layers: defaults < the host's overlay < your file < overrides.

    Args:
        path: a YAML or JSON file; None: no file. A relative path is searched for in the working
            directory, in its parents up to one with a ``pyproject.toml``, and among the files of
            this package.
        env: selects the overlay ``config/env/<env>.yaml``. ``"auto"``: the overlay of this host;
            None: no overlay.
        overrides: a dict of dotted names, or strings such as ``"optim.lr=3e-4"``.

    Raises:
        ConfigError: a file cannot be read, a name is unknown, or a value is not allowed; lists all
            mistakes with file and line.
    """
    layers = [_overlay(env)] if env is not None else []
    layers += [file_layer(path)] if path is not None else []
    return _build([*layers, override_layer(overrides)])


ConfigLike = Config | Mapping[str, object] | str | os.PathLike[str] | None
"""Types accepted as a configuration: also a path, a dict of settings, or None (the defaults)."""


def as_config(config: ConfigLike, processes: int | None = None) -> Config:
    """Convert a configuration of any accepted type to a Config.

    Args:
        config: a Config, a path to a YAML file, a dict of settings, or None for the defaults.
        processes: overrides ``distributed.world_size``.

    Raises:
        ConfigError: ``config`` has another type, or a setting is wrong.
    """
    if config is None or isinstance(config, (str, os.PathLike)):
        config = load_config(config)
    elif isinstance(config, Mapping):
        config = load_config(overrides=config)
    elif not isinstance(config, Config):
        raise ConfigError(
            f"{reprlib.repr(config)} is not a configuration",
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
    from nbtoolkit.host import detect_host

    kind = detect_host().kind
    return "local" if kind in ("jupyter", "script") else kind


def _build(layers: list[Layer]) -> Config:
    layer = merge(canonical(each, fields(Config)) for each in layers)
    try:
        config = Config.model_validate(layer.values)
    except ValidationError as error:
        refuse([*layer.mistakes, *mistakes(error, layer, Config)])
        raise  # not reached: every validation error becomes a mistake
    refuse(list(layer.mistakes))
    config._places.update(layer.places)
    return config


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flat_settings(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
