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
    """The job of `where="slurm"` and `where="ray"`."""

    nodes: Count = 1
    """Machines of a run; a search uses one machine of Slurm, and all of Ray."""
    devices: Count | None = None
    """Ranks of each machine, one per GPU; null: `distributed.world_size` over the machines, or the
    length of `distributed.device_ids`."""
    gpu: bool = True
    """The devices are GPUs (false: each rank has CPUs only)."""
    cpus_per_device: Count | None = None
    """CPUs of each rank; null: the cluster's default for GPUs, 1 without GPUs."""
    memory: Text | None = None
    """Memory of a machine, such as 64G; null: the cluster's default."""
    time_limit: Seconds | None = None
    """Slurm's time limit; null: `runtime.time_budget`, or twelve hours."""
    signal_seconds: Count = 120
    """Slurm: seconds before the time limit at which the ranks save a checkpoint and end."""
    restarts: CountFrom0 = 10
    """How often a job that ends early, by its time limit or a lost machine, starts again and
    resumes."""
    partition: Text | None = None
    """Slurm: the partition."""
    account: Text | None = None
    """Slurm: the account."""
    options: Free = FreeSection()
    """Slurm: more options of sbatch, by their long names (`qos: high`, `exclude: node7`)."""
    modules: Texts = ()
    """Slurm: environment modules to load."""
    setup: Texts = ()
    """Slurm: lines of the shell before the ranks start (`source .venv/bin/activate`)."""
    container: Text | None = None
    """Slurm: container image of the ranks (`srun --container-image`, of the plugin pyxis)."""
    python: Text | None = None
    """Slurm: command that starts Python on the machines (`apptainer exec --nv image.sif python`);
    null: this Python, in a container `python3`."""
    address: Text | None = None
    """Ray: address of the cluster; null: RAY_ADDRESS, or the Ray that runs on this machine."""
