"""Write the scripts that start ``nbtoolkit train`` on several machines: ``nbtoolkit recipe``.

Each script is a commented file of ``templates/``, filled with the shape of the job. In all of them
the ranks exist before nbtoolkit starts, and ``nb.launch`` runs in place.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

KINDS = ("torchrun", "slurm", "ssh", "kubernetes", "kubeflow")
"""What can start the ranks."""

_DAY = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a job asks its machines for.

    Attributes:
        nodes: machines; None: ``cluster.nodes``.
        devices: ranks on each machine, one per GPU; None: ``cluster.devices``, or by
            ``distributed.world_size``, or else by ``distributed.device_ids``.
        gpu: whether the devices are GPUs; False: each rank has CPUs only; None: ``cluster.gpu``.
        seconds: time limit of the job; None: ``cluster.time_limit``, ``runtime.time_budget``, or
            twelve hours.
        name: name of the job: lower-case letters, digits and hyphens.
        image: container image of Kubernetes.
        port: port of the rendezvous on the first machine.
        restarts: how often the ranks start again after a failure.
    """

    nodes: int | None = None
    devices: int | None = None
    gpu: bool | None = None
    seconds: float | None = None
    name: str = "train"
    image: str = "IMAGE"
    port: int = 29400
    restarts: int = 3


class _Variable(NamedTuple):
    """An environment variable of the ranks, and the lines of the comment above it."""

    name: str
    value: str
    why: tuple[str, ...]


def recipe(kind: str, config: Config, shape: Shape, arguments: Iterable[str] = ()) -> str:
    """Return a commented script that trains on the machines of ``shape``.

    Args:
        kind: what starts the ranks, of :data:`KINDS`.
        config: the settings that the ranks will read.
        shape: the machines.
        arguments: those of ``nbtoolkit train``: the file of ``config``, and overrides.

    Raises:
        PlanError: no such kind, or the shape contradicts the settings.
    """
    if kind not in KINDS:
        raise PlanError(
            f"there is no recipe for {kind!r}", allowed=", ".join(KINDS), do="name one of them"
        )
    words = list(arguments)
    values = {**_values(config, shape), "name": _name(shape.name)}
    values["arguments"] = shlex.join(words)
    values["yaml_arguments"] = _items(12 if kind == "kubernetes" else 6, words)
    values["yaml_environment"] = _yaml_environment(
        10 if kind == "kubernetes" else 4, _environment(_gpu(config, shape), _nodes(config, shape))
    )
    values["command"] = f"python -m nbtoolkit train {values['arguments']}".rstrip()
    return _fill(_file(kind, _nodes(config, shape) > 1), values)


def slurm_script(
    config: Config, shape: Shape, command: str, srun: str, *, alone: bool, early: str
) -> str:
    """Return the script of a job of Slurm.

    Args:
        config: the settings of the run.
        shape: the machines.
        command: what each task runs, for the shell.
        srun: further options of srun, for the shell.
        alone: one task per node with all of its devices, instead of one per device.
        early: a file that a rank makes when the run has ended early.
    """
    values = {**_values(config, shape, alone=alone), "command": command, "name": shape.name}
    values["srun"] = f"--kill-on-bad-exit=1 {srun}"
    values["early"] = f"-e {shlex.quote(early)}"
    values["slurm_end"] = f"{_KILLED}\nrm -f {shlex.quote(early)}"
    return _fill("slurm.sh", values)


def _values(config: Config, shape: Shape, *, alone: bool = False) -> dict[str, object]:
    """What the places of all templates hold."""
    devices, nodes, gpu = devices_of(config, shape), _nodes(config, shape), _gpu(config, shape)
    seconds = shape.seconds or config.cluster.time_limit or config.runtime.time_budget or _DAY / 2
    environment = _environment(gpu, nodes)
    return {
        "nodes": nodes,
        "devices": devices,
        "processes": nodes * devices,
        "restarts": shape.restarts,
        "port": shape.port,
        "image": json.dumps(shape.image),
        "seconds": int(seconds),
        "time": _slurm_time(int(seconds)),
        "tasks": 1 if alone else devices,
        "signal": config.cluster.signal_seconds,
        "requeues": config.cluster.restarts,
        "slurm_resources": _slurm_resources(config, gpu, devices, alone),
        "slurm_options": _slurm_options(config),
        "slurm_setup": _slurm_setup(config),
        "slurm_tasks": "" if alone else _TASKS,
        "slurm_end": _EARLY,
        "srun": "--kill-on-bad-exit=0 --wait=180",
        "early": '"$status" -eq 3',
        "kubernetes_device": "nvidia.com/gpu" if gpu else "cpu",
        "nccl": _exports(environment),
        "environment": shlex.join(f"{name}={value}" for name, value, _ in environment),
    }


_TASKS = """\
# srun starts one task per device on every node, and sets each task's rank: nbtoolkit reads it. The
# address of the first node comes from Slurm's list of nodes, which is compressed (n[1-4]) and needs
# no parsing here."""


_KILLED = """\
# --kill-on-bad-exit: the other ranks end when one fails, else they would wait for it."""
_EARLY = """\
# --wait: when one rank has failed, the others end three minutes later, else they would wait for it.
# Not at once, as with --kill-on-bad-exit=1: ranks end with 3 one after the other when the run ended
# early, and the status would be that of a killed one."""


def _slurm_resources(config: Config, gpu: bool, devices: int, alone: bool) -> str:
    cluster = config.cluster
    cpus = cluster.cpus_per_device or (None if gpu else 1)
    options: dict[str, object] = {"gpus-per-node": devices} if gpu else {}
    if cpus is not None:
        options["cpus-per-task"] = cpus * devices if alone else cpus
    if cluster.memory:
        options["mem"] = cluster.memory
    return _sbatch(options)


def _slurm_options(config: Config) -> str:
    cluster = config.cluster
    named = {"partition": cluster.partition, "account": cluster.account}
    options: dict[str, object] = {name: value for name, value in named.items() if value}
    options |= {name: value for name, value in cluster.options.items() if value is not None}
    if options:
        return _sbatch(options)
    return (
        "# Partition and account of your cluster:\n"
        "##SBATCH --partition=gpu\n##SBATCH --account=ACCOUNT"
    )


def _sbatch(options: Mapping[str, object]) -> str:
    """Lines that sbatch reads; a value of true is an option without a value."""
    lines = []
    for name, value in options.items():
        text = "" if value is True else f"={value}"
        if not re.fullmatch(r"[a-z][a-z-]*", name) or re.search(r"[\s\"'\\]", text):
            raise PlanError(
                f"cluster: {name}: {value!r} is not an option of sbatch",
                allowed="a long name without --, such as qos, and a value without spaces or quotes",
                do="correct cluster.options, cluster.partition, cluster.account or cluster.memory",
            )
        lines.append(f"#SBATCH --{name}{text}")
    return "\n".join(lines)


def _slurm_setup(config: Config) -> str:
    modules = [f"module load {shlex.quote(name)}" for name in config.cluster.modules]
    lines = [*modules, *config.cluster.setup]
    return "\n".join(
        lines or ["# Your environment:", "# module load cuda", "# source .venv/bin/activate"]
    )


def _nodes(config: Config, shape: Shape) -> int:
    return config.cluster.nodes if shape.nodes is None else shape.nodes


def _gpu(config: Config, shape: Shape) -> bool:
    return config.cluster.gpu if shape.gpu is None else shape.gpu


def devices_of(config: Config, shape: Shape) -> int:
    """Return the ranks of a machine, by the shape or the settings.

    Raises:
        PlanError: they do not follow, or contradict ``distributed.world_size``.
    """
    nodes, size = _nodes(config, shape), config.distributed.world_size
    asked = shape.devices or config.cluster.devices
    if asked is None and isinstance(size, int) and size % nodes == 0:
        asked = size // nodes
    if asked is None and (ids := config.distributed.device_ids) is not None:
        asked = len(ids)
    if asked is None:
        raise PlanError(
            "the number of devices of a machine is not known",
            allowed="a number, or distributed.world_size as a multiple of the nodes",
            do="set cluster.devices, or pass --devices to nbtoolkit recipe",
        )
    if isinstance(size, int) and size != asked * nodes:
        raise PlanError(
            f"distributed.world_size is {size}, and {nodes} nodes with {asked} devices each "
            f"make {asked * nodes} ranks",
            allowed="nodes x devices = distributed.world_size, or no distributed.world_size",
            do="change cluster.nodes or cluster.devices (--nodes, --devices), or set "
            f"distributed.world_size: {asked * nodes}",
        )
    return asked


def _name(name: str) -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
        raise PlanError(
            f"a job cannot be called {name!r}",
            allowed="lower-case letters, digits and hyphens, a letter first, 52 at most "
            "(Kubernetes makes host names of it)",
            do="pass another --name",
        )
    return name


def _environment(gpu: bool, nodes: int) -> list[_Variable]:
    """The variables of the ranks."""
    if not gpu:
        return []
    warnings = ("Warnings of NCCL; INFO shows which network each rank takes.",)
    interfaces = (
        "NCCL takes any interface but the loopback and Docker's bridge, which other machines",
        "do not reach. If it takes a slow one, name the fast one, such as ib0.",
    )
    variables = [_Variable("NCCL_DEBUG", "WARN", warnings)]
    if nodes > 1:
        variables.append(_Variable("NCCL_SOCKET_IFNAME", "^lo,docker0", interfaces))
    return variables


def _exports(variables: Iterable[_Variable]) -> str:
    lines: list[str] = []
    for name, value, why in variables:
        lines += [*(f"# {line}" for line in why), f"export {name}={shlex.quote(value)}"]
    return "\n".join(lines)


def _slurm_time(seconds: int) -> str:
    """``1-02:30:00``, as ``sbatch --time`` reads it."""
    days, rest = divmod(seconds, _DAY)
    return f"{days}-{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


def _items(indent: int, words: Iterable[str]) -> str:
    """Lines of a YAML list; JSON's strings are YAML's."""
    return "\n".join(f"{' ' * indent}- {json.dumps(word)}" for word in words)


def _yaml_environment(indent: int, variables: Iterable[_Variable]) -> str:
    margin, lines = " " * indent, [f"{' ' * indent}env:"]
    for name, value, why in variables:
        lines += [f"{margin}  # {line}" for line in why]
        lines += [f"{margin}  - name: {name}", f"{margin}    value: {json.dumps(value)}"]
    return "\n".join(lines) if len(lines) > 1 else ""


def _file(kind: str, several: bool) -> str:
    if kind in ("kubernetes", "kubeflow"):
        return f"{kind}.yaml"
    return "torchrun-nodes.sh" if kind == "torchrun" and several else f"{kind}.sh"


def _fill(file: str, values: dict[str, object]) -> str:
    """The text of a template with its ``{{places}}`` filled."""
    text = files("nbtoolkit.cluster").joinpath("templates", file).read_text()
    text = re.sub(r"\{\{(\w+)\}\}", lambda place: str(values[place[1]]), text)
    # An empty place leaves no trailing space and no more than one empty line.
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +$", "", text, flags=re.MULTILINE))
