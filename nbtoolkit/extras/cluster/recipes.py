"""Fill the files of ``templates/``, which start ``nbtoolkit train`` on several machines.

In all of them the ranks exist before nbtoolkit starts, and ``nb.launch`` runs in place.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

TEMPLATES = {
    "torchrun": "torchrun.sh",
    "slurm": "slurm.sh",
    "ssh": "ssh.sh",
    "kubernetes": "kubernetes.yaml",
    "kubeflow": "kubeflow.yaml",
}
"""What can start the ranks, and the file of its script."""

_HALF_A_DAY = 12 * 3600


def recipe(
    kind: str,
    config: Config,
    arguments: Iterable[str] = (),
    *,
    name: str = "train",
    image: str = "IMAGE",
    port: int = 29400,
) -> str:
    """Return a commented script that trains on the machines of ``config.cluster``.

    Args:
        kind: what starts the ranks, of :data:`TEMPLATES`.
        config: the settings of the machines.
        arguments: those of ``nbtoolkit train``: a file of settings, and overrides.
        name: name of the job.
        image: container image of Kubernetes.
        port: port of the rendezvous on the first machine.

    Raises:
        PlanError: no such kind, or the settings contradict each other.
    """
    if kind not in TEMPLATES:
        raise PlanError(
            f"there is no recipe for {kind!r}", allowed=", ".join(TEMPLATES), do="name one of them"
        )
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
        raise PlanError(
            f"a job cannot be called {name!r}",
            allowed="lower-case letters, digits and hyphens, a letter first, 52 at most "
            "(Kubernetes makes host names of it)",
            do="pass another --name",
        )
    words = ["nbtoolkit", "train", *arguments]
    if kind == "slurm":
        # A run that ended early ends with 3. srun ends the other ranks only three minutes after
        # the first: at once, as with --kill-on-bad-exit=1, the status would be of a killed one.
        return slurm_script(
            config,
            name=name,
            tasks=devices_per_node(config),
            command=f"--kill-on-bad-exit=0 --wait=180 python -m {shlex.join(words)}",
            ended_early='"$status" -eq 3',
        )
    cluster = config.cluster
    several = kind == "torchrun" and cluster.nodes > 1
    return _fill(
        "torchrun-nodes.sh" if several else TEMPLATES[kind],
        {
            **_size(config),
            "name": name,
            "image": json.dumps(image),
            "port": port,
            "seconds": int(_seconds(config)),
            "resource": "nvidia.com/gpu" if cluster.gpu else "cpu",
            "module": shlex.join(words),
            # JSON's lists are YAML's.
            "arguments": json.dumps(words[2:]),
        },
    )


def slurm_script(
    config: Config, *, name: str, tasks: int, command: str, ended_early: str, setup: str = ""
) -> str:
    """Return the script of a job of Slurm on the machines of ``config.cluster``.

    Args:
        config: the settings of the machines.
        name: name of the job.
        tasks: how many processes srun starts on a node; they share its devices.
        command: options of srun and the command of a task, for the shell.
        ended_early: what is true for the shell's ``[`` when the run has to go on in another job.
        setup: a line before the command.
    """
    cluster = config.cluster
    devices = devices_per_node(config)
    options: dict[str, object] = {"gpus-per-node": devices if cluster.gpu else None}
    if cluster.cpus_per_device or not cluster.gpu:
        options["cpus-per-task"] = (cluster.cpus_per_device or 1) * devices // tasks
    options |= {
        "mem": cluster.memory,
        "partition": cluster.partition,
        "account": cluster.account,
        **cluster.options,
    }
    modules = [f"module load {shlex.quote(module)}" for module in cluster.modules]
    return _fill(
        "slurm.sh",
        {
            **_size(config),
            "name": name,
            "tasks": tasks,
            "options": _sbatch(options),
            "minutes": math.ceil(_seconds(config) / 60),
            "signal": cluster.signal_seconds,
            "setup": "\n".join(line for line in (*modules, *cluster.setup, setup) if line),
            "command": command,
            "ended_early": ended_early,
            "requeues": cluster.restarts,
        },
    )


def devices_per_node(config: Config) -> int:
    """Return the ranks of a machine, by ``cluster`` or ``distributed``.

    Raises:
        PlanError: they do not follow, or contradict ``distributed.world_size``.
    """
    nodes = config.cluster.nodes
    size = config.distributed.world_size
    devices = config.cluster.devices
    if devices is None and isinstance(size, int) and size % nodes == 0:
        devices = size // nodes
    if devices is None and config.distributed.device_ids is not None:
        devices = len(config.distributed.device_ids)
    if devices is None:
        raise PlanError(
            "the number of devices of a machine is not known",
            allowed="a number, or distributed.world_size as a multiple of the nodes",
            do="set cluster.devices, or pass --devices to nbtoolkit recipe",
        )
    if isinstance(size, int) and size != devices * nodes:
        raise PlanError(
            f"distributed.world_size is {size}, and {nodes} nodes with {devices} devices each "
            f"make {devices * nodes} ranks",
            allowed="nodes x devices = distributed.world_size, or no distributed.world_size",
            do="change cluster.nodes or cluster.devices (--nodes, --devices), or set "
            f"distributed.world_size: {devices * nodes}",
        )
    return devices


def _size(config: Config) -> dict[str, object]:
    nodes = config.cluster.nodes
    devices = devices_per_node(config)
    return {"nodes": nodes, "devices": devices, "processes": nodes * devices}


def _seconds(config: Config) -> float:
    return config.cluster.time_limit or config.runtime.time_budget or _HALF_A_DAY


def _sbatch(options: Mapping[str, object]) -> str:
    """Lines that sbatch reads; a value of true is an option without a value, None is no option."""
    lines = []
    for name, value in options.items():
        text = "" if value is True else f"={value}"
        if not re.fullmatch(r"[a-z][a-z-]*", name) or re.search(r"[\s\"'\\]", text):
            raise PlanError(
                f"cluster: {name}: {value!r} is not an option of sbatch",
                allowed="a long name without --, such as qos, and a value without spaces or quotes",
                do="correct cluster.options, cluster.partition, cluster.account or cluster.memory",
            )
        if value is not None:
            lines.append(f"#SBATCH --{name}{text}")
    return "\n".join(lines)


def _fill(file: str, values: Mapping[str, object]) -> str:
    """Return the text of a template with its ``{{places}}`` filled."""
    text = files("nbtoolkit.extras.cluster").joinpath("templates", file).read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda place: str(values[place[1]]), text)
