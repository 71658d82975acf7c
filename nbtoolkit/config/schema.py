"""Define the settings of a run, and load them.

The string under a field is its documentation. The sections `model` and `data` are free; elsewhere
an unknown name or an invalid value is an error with its line, the allowed values and a suggestion.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr

from nbtoolkit.config import reads
from nbtoolkit.config.checks import conflicts
from nbtoolkit.config.fields import (
    Above1,
    Auto,
    Below1,
    Choice,
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
    Section,
    Seed,
    Share,
    TaskName,
    Text,
    Texts,
    flat_settings,
)
from nbtoolkit.config.loading import (
    Keys,
    Layer,
    Overrides,
    dump,
    file_layer,
    merge,
    override_layer,
    refuse,
    shipped_folder,
    validate,
    with_our_names,
)
from nbtoolkit.errors import ConfigError


class Optim(Section):
    """The optimizer and its schedule, as `nb.fit` builds them."""

    name: OptimizerName = "adamw"
    """The optimizer class: a short name for a class of torch, or the dotted name of any other
    class."""
    options: Free = FreeSection()
    """More keyword arguments of the optimizer class, such as `betas`, `eps` or `nesterov`."""
    param_groups: ParamGroups = ()
    """Groups of parameters with their own values. In each group, `match` is a pattern of parameter
    names, or a list of patterns. The other keys are `lr` or `lr_scale` (a factor for `optim.lr`),
    `weight_decay` and other arguments of the optimizer."""
    lr: Positive = 1e-3
    """The peak learning rate, before `lr_rule` changes it. `nb.find_learning_rate` suggests one."""
    weight_decay: NotNegative = 0.01
    """The weight decay coefficient. `adamw` uses decoupled weight decay."""
    decay_all: bool = False
    """Apply weight decay to all parameters. false: not to biases, the weights of normalization
    layers and other parameters with at most one dimension."""
    momentum: Share = 0.9
    """The momentum of `sgd`. Other optimizers ignore it. With `schedule: one_cycle`, the momentum
    varies from 0.95 to 0.85 and back instead, unless you set it to 0."""
    schedule: Literal["cosine", "linear", "constant", "one_cycle", "plateau", "range_test"] = (
        "cosine"
    )
    """The learning-rate schedule after the warm-up. `plateau` can lower the rate after an epoch;
    the other schedules set it for each optimizer step. With `range_test`, the rate rises
    exponentially, as in `nb.find_learning_rate`."""
    warmup_ratio: Share = 0.05
    """The length of the warm-up, as a share of all optimizer steps. In the warm-up, the learning
    rate rises to its peak."""
    min_lr_ratio: Share = 0.0
    """The lowest learning rate after the warm-up, as a share of the peak. `constant` ignores it.
    With `range_test`, the rate starts at this share of the peak (0: at 1e-6)."""
    plateau_patience: Count = 5
    """With `schedule: plateau`: the learning rate drops after this number of epochs in a row
    without an improvement of `checkpoint.monitor`."""
    plateau_factor: Share = 0.1
    """With `schedule: plateau`: each drop multiplies the learning rate by this factor."""
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    """With `train.batch_size_per_device`: how the learning rate grows with n, the number of ranks
    times the accumulation steps. `linear` multiplies it by n, and `sqrt` by the square root of
    n."""


class Train(Section):
    """Length of the training, batch size, precision and averaging."""

    epochs: Count = 10
    """The number of passes over the training data."""
    max_steps: Count | None = None
    """End the training after this number of optimizer steps, even if some epochs are left. Use it
    for profiling and smoke tests. null: no limit."""
    batch_size: Count = 128
    """The number of samples per optimizer step, over all ranks and accumulation steps."""
    batch_size_per_device: Count | None = None
    """The number of samples per forward pass on one device. Set it instead of `batch_size`."""
    precision: Annotated[Literal["auto", "fp32", "fp16", "bf16"], Choice] = "auto"
    """`auto` chooses by the compute capability of the GPU: bf16 from 8.0 on, fp16 from 7.0 on (such
    as a T4), fp32 below. On the CPU, `auto` is fp32."""
    drop_last: bool = False
    """Skip the last optimizer step of an epoch if it would have fewer samples than `batch_size`.
    false: the step runs, and its loss is the mean over its own samples."""
    sample_weights: Literal["balanced"] | None = None
    """`balanced`: draw the samples with replacement, each class with the same probability. null:
    use each sample once per epoch."""
    loss_reduction: Literal["auto", "batch"] = "auto"
    """`auto`: `nb.fit` detects in the first batch whether the loss is a mean, a sum or a weighted
    mean over the samples. `batch`: accept a loss that compares or combines the samples of a batch
    (Dice, contrastive). Its value depends on the number of ranks. In your own loop, `auto` warns of
    a loss in the first step that depends on the number of ranks, `batch` does not."""
    max_grad_norm: Positive | None = None
    """Gradient clipping: scale gradients with a larger norm down to this norm. null: no
    clipping."""
    gradient_accumulation_steps: Auto | Count = "auto"
    """The number of micro-batches per optimizer step. `auto`: one at first. If a rank runs out of
    memory in `nb.fit`, all ranks start again from the newest checkpoint, with about twice as many
    micro-batches."""
    num_workers: CountFrom0 = 0
    """The number of DataLoader processes per rank. Tensors, arrays and streams have none.
    `nb.compare` measures which number is fast."""
    compile: bool = False
    """Compile the model with `torch.compile`. The first step can take minutes; later steps are
    faster."""
    profile: bool = False
    """Record a few optimizer steps with `torch.profiler`. Each rank writes a trace, and rank 0
    prints a table."""
    channels_last: bool = False
    """Use the channels-last memory format. It makes convolutions faster on GPUs with tensor
    cores."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass. This needs less memory, but more time."""
    fp16_weights: Literal["refuse", "upcast"] = "refuse"
    """What `nb.fit` does with trainable weights in half precision. `refuse` raises an error if they
    are fp16. `upcast` converts fp16 and bf16 weights to fp32."""
    weight_averaging: Literal["none", "ema", "swa"] = "none"
    """Validate and save averaged weights. `ema`: the exponential moving average over all steps.
    `swa`: the mean of the weights at the ends of the last epochs."""
    ema_decay: Share = 0.999
    """With `ema`: the decay of the average per step. In the first steps, the decay is lower."""
    swa_start: Share = 0.75
    """With `swa`: the share of all steps after which the averaging starts."""
    swa_lr: Positive | None = None
    """With `swa`: the constant learning rate from `swa_start` on. null: the rate of the
    schedule."""
    early_stopping_patience: Count | None = None
    """End the training after this number of epochs in a row without an improvement of
    `checkpoint.monitor`. null: no early stopping."""
    min_delta: NotNegative = 0.0
    """Smallest improvement that counts for `early_stopping_patience`."""
    scaler_init_scale: Positive = 65536.0
    """The initial loss scale of the fp16 training."""
    scaler_growth_interval: Count = 2000
    """The loss scale grows after this number of steps in a row without an overflow."""
    scaler_growth_factor: Above1 = 2.0
    """The factor by which the loss scale grows."""
    scaler_backoff_factor: Below1 = 0.5
    """An overflow multiplies the loss scale by this factor."""


StrategyName = Annotated[
    Literal["auto", "single", "ddp", "fsdp", "deepspeed", "hybrid", "dp", "measured"], Choice
]
SHARDED = ("fsdp", "deepspeed", "hybrid")
"""Names of strategies that train with torch's FSDP."""


class Distributed(Section):
    """Number of ranks, their devices, and how they communicate."""

    enabled: Auto | bool = "auto"
    """Whether to use several ranks. `auto`: yes, if there are two or more equal, usable GPUs, or if
    `world_size` or `strategy` asks for several ranks. true: yes, even on the CPU. false: no, one
    process."""
    strategy: StrategyName = "auto"
    """How the ranks divide the model and the work. `single`: one process. `ddp`:
    DistributedDataParallel. `fsdp`: each rank keeps a part of the weights, gradients and optimizer
    state. `deepspeed`: the same, with `zero_stage: 2`. `hybrid`: from four devices on, two groups
    of ranks, with `fsdp` in each group. `dp`: DataParallel, one process on several GPUs. `auto`:
    the fastest strategy that `nb.calibrate` has measured, otherwise `ddp`, or `single` on one
    device. `measured`: like `auto`, but a launch without a calibration raises an error."""
    zero_stage: Literal[1, 2, 3] | None = None
    """With `fsdp`: how long a rank keeps the weights that it has gathered. 2: from the forward to
    the end of the backward pass. 3: for one layer at a time. 1 means 2. null: 3, with `deepspeed`
    2. With `strategy: auto`, a number means `fsdp`."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """With `fsdp`, on GPUs: whether the weights, gradients and optimizer state of a rank are in CPU
    memory, where the optimizer's step then runs. `optimizer` means `all`. With `strategy: auto`,
    these two mean `fsdp`."""
    world_size: Auto | Count = "auto"
    """The number of ranks. `auto`: one per usable GPU of the best model, or one on the CPU. The
    argument `processes` of `nb.launch` overrides this setting."""
    backend: Annotated[Literal["auto", "nccl", "gloo", "tensorflow"], Choice] = "auto"
    """The communication backend. `auto`: `nccl` between GPUs, otherwise `gloo`. `tensorflow`: one
    process, in which TensorFlow's `MirroredStrategy` uses all GPUs."""
    fallback: bool = True
    """What happens if the ranks cannot form a process group. true: the run continues with one
    process, and a message says so. false: the launch raises an error."""
    device_ids: Devices | None = None
    """The numbers of the devices to use. null: all usable devices."""
    port: Auto | Port = "auto"
    """The port through which the ranks find each other. `auto`: a free port for each launch."""
    timeout: Seconds = 1800.0
    """The timeout of collective operations. It must be longer than `runtime.hang_timeout`."""
    sync_batchnorm: bool = False
    """Compute batch-norm statistics over all ranks. This has no effect on the CPU."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters without a gradient in every step."""
    broadcast_buffers: bool = True
    """Let DDP copy the buffers of rank 0 to all ranks before each forward pass."""
    gradient_as_bucket_view: bool = True
    """Let the gradients be views into DDP's buckets. This saves the memory of a second copy."""
    bucket_cap_mb: Positive = 25.0
    """The size of DDP's gradient buckets, in MiB."""
    static_graph: bool = False
    """Tell DDP that every step uses the same parameters. If this is not true, the results are
    wrong."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """How the ranks compress the gradients that they exchange. Compression is faster over slow
    connections, but not exact."""
    powersgd_rank: Count = 1
    """With `powersgd`: the rank of the matrices that approximate the gradients. The compression
    starts after a tenth of all steps, or after 1000 steps if that is sooner."""

    @property
    def is_sharded(self) -> bool:
        """Whether a rank of several has only a part of the model's weights and optimizer state."""
        return bool(self.sharded_by)

    @property
    def sharded_by(self) -> str:
        """The setting that asks for it, with its value; empty: none does."""
        if self.strategy in SHARDED:
            return f"distributed.strategy: {self.strategy}"
        if self.strategy != "auto":
            return ""
        if self.zero_stage is not None:
            return f"distributed.zero_stage: {self.zero_stage}"
        return "" if self.offload == "none" else f"distributed.offload: {self.offload}"


class Checkpoint(Section):
    """Checkpoints, to resume from and to predict with."""

    enabled: bool = True
    """Let `nb.fit`, `ctx.watch` and `nbtoolkit.integrations` write checkpoints."""
    every_minutes: Positive | None = 10.0
    """The longest time between two checkpoints, in minutes. null: no limit."""
    every_epochs: Count | None = None
    """Also write a checkpoint every `every_epochs` epochs."""
    every_steps: Count | None = None
    """Also write a checkpoint every `every_steps` optimizer steps."""
    keep_last: Count = 2
    """The number of newest checkpoints to keep. The weights of the best epoch are kept, too."""
    monitor: Text | None = None
    """The metric that decides which epoch is best. null: `val_loss`. Without validation data, null
    means that no epoch counts as best; early stopping and `optim.schedule: plateau` then use
    `train_loss`."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the lowest (`min`) or the highest value (`max`) of the metric is best. `auto`: its
    name decides (`val_mae`: `min`); see docs/sweep/metric.md."""
    weights: Literal["best", "last"] = "best"
    """Whether the model has the weights of the best or the last epoch after `nb.fit`. `load_into`,
    `nb.load_model` and `cv.models` load the same weights."""


class Tracking(Section):
    """Tracking services and what is logged."""

    mlflow: bool = True
    """Write an MLflow run for each launch."""
    tensorboard: bool = False
    """Write TensorBoard files to the run's folder."""
    wandb: bool = False
    """Write W&B runs. Without an API key or internet, they are written offline, to the run's
    folder."""
    wandb_project: Text | None = None
    """The name of the W&B project. null: the value of `tracking.experiment`."""
    uri: Text | None = None
    """The tracking URI of MLflow. null: the URI of `mlflow.set_tracking_uri` or of the environment
    variable `MLFLOW_TRACKING_URI`, or if there is none, an SQLite database in
    `runtime.output_dir`."""
    experiment: Text = "nbtoolkit"
    """The name of the MLflow experiment."""
    log_every_n_steps: Count = 10
    """`nb.fit` logs the training loss each time that this number of optimizer steps is done."""
    device_metrics: bool = True
    """Log the memory and the utilization of the devices every few seconds."""


class Runtime(Section):
    """Output folder, time limits and health checks."""

    output_dir: OutputFolder = "outputs"
    """The folder that contains all run folders. `{scratch}` is the host's folder for large
    temporary files."""
    time_budget: Seconds | None = None
    """The time limit of a run, counted from the launch. Before the limit, the run saves a
    checkpoint and ends with the status `deadline`. null: no limit."""
    deadline: Seconds | None = None
    """The time limit of a notebook or script: all launches, sweeps and cross-validations in it end
    before this time. It is counted from the start of the process. See `nb.set_deadline`. null: no
    limit."""
    session_limit: Seconds | None = None
    """The time after which the host ends the session, counted from the start of the container. A
    run ends before that; `shutdown_margin` says how long before. null: no limit."""
    shutdown_margin: Seconds = 60.0
    """A run ends this long before `session_limit`, so that the rest of the notebook has time."""
    pack: Auto | bool = "auto"
    """Call `nb.pack` for `output_dir` when a run ends at its deadline. `auto`: only on Kaggle and
    Colab."""
    quota_hours: Positive | None = None
    """The GPU hours of your host's weekly quota. `nb.quota` and the cost of a search in the panel
    use this number. null: unknown."""
    hang_timeout: Seconds = 300.0
    """A rank counts as hung if it sends no message and computes nothing for this time, while
    another rank waits for it or has returned."""
    restarts: Auto | CountFrom0 = "auto"
    """How often a run starts its ranks again, from the last checkpoint, after a rank has died, hung
    or raised an error. An error that comes back at the same step ends the run. `auto`: 2 where
    nobody watches (a script, a notebook in the background), 0 in a live notebook. A search restarts
    its trials and folds only if this is a number."""
    compare_ranks: bool = True
    """Warn if the ranks train different models, or report different numbers under one name.
    nbtoolkit compares some weights and the numbers at each report and, except under torchrun and
    srun, at the end."""


class Cluster(Section):
    """The job that `where="slurm"` or `where="ray"` submits."""

    nodes: Count = 1
    """The number of machines of a run. A search needs 1 on Slurm. On Ray, a search ignores this
    number and uses all machines of the cluster."""
    devices: Count | None = None
    """The number of ranks per machine, each with its own GPU. null: `distributed.world_size`
    divided by `nodes`, or the length of `distributed.device_ids`."""
    gpu: bool = True
    """Whether each rank has a GPU. false: the ranks have CPUs only."""
    cpus_per_device: Count | None = None
    """The number of CPUs per rank. null: 1, but on Slurm with GPUs the default of the cluster."""
    memory: Text | None = None
    """Slurm: the memory per machine, such as 64G. null: the default of the cluster."""
    time_limit: Seconds | None = None
    """The time limit of a job on Slurm or Kubernetes. null: `runtime.time_budget`, or twelve hours
    if that is null, too."""
    signal_seconds: Count = 120
    """Slurm: this many seconds before the time limit, the ranks save a checkpoint and end."""
    restarts: CountFrom0 = 10
    """How often a job starts again and resumes the run, after its time limit (Slurm) or after the
    loss of a machine (Ray)."""
    partition: Text | None = None
    """Slurm: the partition."""
    account: Text | None = None
    """Slurm: the account."""
    options: Free = FreeSection()
    """Slurm: more options of `sbatch`, with their long names (`qos: high`, `exclude: node7`)."""
    modules: Texts = ()
    """Slurm: the environment modules to load (`module load`)."""
    setup: Texts = ()
    """Slurm: shell commands that run before the ranks start (`source .venv/bin/activate`)."""
    container: Text | None = None
    """Slurm: the container image of the ranks. This needs the Slurm plugin pyxis."""
    python: Text | None = None
    """Slurm: the command that starts Python, such as `apptainer exec --nv image.sif python`. null:
    the Python of this process, or `python3` if `container` is set."""
    address: Text | None = None
    """Ray: the address of the cluster. null: the environment variable `RAY_ADDRESS`, or the cluster
    to which this machine belongs."""


class _Places(dict[Keys, str]):
    """Places where settings were set; all are equal, so that they do not affect equality."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Places)


class Config(Section):
    """All settings of a run.

    :func:`load_config` makes a Config. A Config is read-only; :meth:`with_overrides` makes a
    changed copy.
    """

    task: TaskName = "nbtoolkit.tasks.digits:train"
    """The name of the training function, for the command line and for a panel or notebook without a
    function of its own. In a cell, you pass the function itself. The `config.yaml` of a run
    contains the name of the function that ran, such as `__main__:train` for the function `train` of
    a notebook."""
    seed: Seed = 0
    """The seed of the initial weights, the order of the samples and all other random numbers."""
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
    """The job that `where="slurm"` or `where="ray"` submits."""
    _places: _Places = PrivateAttr(default_factory=_Places)

    def with_overrides(self, overrides: Overrides) -> Config:
        """Return a copy with some settings changed.

        Args:
            overrides: ``{"optim.lr": 3e-4}``, ``{"optim": {"lr": 3e-4}}`` or ``["optim.lr=3e-4"]``.

        Raises:
            ConfigError: a name is unknown or a value is not allowed. The message lists all
                mistakes.
        """
        current = Layer(values=self.model_dump(exclude_unset=True), places=self._places)
        return _build([current, override_layer(overrides)])

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain dicts and lists, which ``Config.model_validate`` reads."""
        reads.note_dump(reads.ALL)
        values = self.model_dump()
        if self.train.batch_size_per_device is not None:
            # It has no effect then, and setting both is an error.
            del values["train"]["batch_size"]
        return values

    def to_yaml(self) -> str:
        """Return all settings as YAML text; :func:`load_config` makes an equal Config from it."""
        return dump(self.to_dict())

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ, as ``{dotted name: (value here, value in other)}``.

        A value is None if the Config does not have this setting.
        """
        settings = flat_settings(self.to_dict())
        others = flat_settings(other.to_dict())
        return {
            name: (settings.get(name), others.get(name))
            for name in {**settings, **others}
            if settings.get(name) != others.get(name)
        }

    def place(self, name: str) -> str:
        """Return where a setting was set, such as ``train.yaml:4`` or ``override 'optim.lr'``.

        A setting that nobody has set is ``the default``. One that was given to the class, such as
        ``Config(seed=1)``, is ``set in Python``.
        """
        if place := self._places.get(tuple(name.split("."))):
            return place
        return "set in Python" if name in self.differences(Config()) else "the default"

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
    """Load a Config from four layers: the defaults, the host's overlay, your file, the overrides.

    If several layers have the same setting, the last one of them counts.

    Args:
        path: a YAML or JSON file; None: no file. A relative path is searched for in the working
            directory, and then in its parents up to the first one with a ``pyproject.toml``. If
            the path begins with ``config/`` or ``notebooks/``, it is then searched for among the
            files of this package.
        env: the name of the overlay, which is the file ``config/env/<env>.yaml``. ``"auto"``: the
            overlay of this host; None: no overlay.
        overrides: a dict of settings by dotted name, or strings such as ``"optim.lr=3e-4"``.

    Raises:
        ConfigError: a file cannot be read, a name is unknown, or a value is not allowed. The
            message lists all mistakes with file and line.
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


def _build(layers: Iterable[Layer]) -> Config:
    layer = merge(with_our_names(each, Config) for each in layers)
    config = validate(Config, layer)
    refuse([*conflicts(config, layer.places)])
    config._places.update(layer.places)
    return config
