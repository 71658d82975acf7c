"""Define the base of all sections of settings, and the sections tracking, runtime and cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from nbtoolkit.config.fields import (
    Count,
    CountFrom0,
    Free,
    FreeSection,
    OutputFolder,
    Positive,
    Seconds,
    Text,
    Texts,
)
from nbtoolkit.config.reads import mark_read
from nbtoolkit.errors import ConfigError

Auto = Literal["auto"]


class Section(BaseModel):
    """Base of all sections: frozen, without unknown names; a field's docstring is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    # Type checkers would accept any attribute of a class with this method.
    if not TYPE_CHECKING:

        def __getattribute__(self, name):
            mark_read(type(self).__name__, name)
            return super().__getattribute__(name)

        def __setattr__(self, name, value):
            if name.startswith("_"):
                super().__setattr__(name, value)
                return
            # A section of Config has the name of its class.
            section, package = type(self).__name__.lower(), __name__.rpartition(".")[0]
            of_config = type(self).__module__.startswith(package) and section != "config"
            key = f"{section}.{name}" if of_config else name
            raise ConfigError(
                f"a configuration is frozen: {key} cannot be set",
                allowed="a new configuration with another value",
                do=f"config = config.with_overrides({{{key!r}: {value!r}}})",
            )


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
    record_samples: bool = False
    """Let `nb.fit` record which samples each optimizer step uses, in the folder `samples` of the
    run."""


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
