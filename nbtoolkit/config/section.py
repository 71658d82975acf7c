"""Define the base of all sections of settings, and the section of clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from nbtoolkit.config.fields import Count, CountFrom0, Free, FreeSection, Seconds, Text, Texts
from nbtoolkit.config.validation import mark_read
from nbtoolkit.errors import ConfigError


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
