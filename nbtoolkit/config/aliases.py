"""Map a few setting names of other launchers to nbtoolkit's, and list the names it rejects.

`canonical` renames the settings of a layer before they are checked. An error explains each name of
another tool that is not accepted.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from nbtoolkit.config.yaml_source import Keys, Layer, Mistake
from nbtoolkit.errors import LaunchError

P = ParamSpec("P")
T = TypeVar("T")

# Similarity of val_acuracy and val_accuracy: 0.96; of val_mae and val_mse: 0.86.
_MIN_SIMILARITY = 0.9
_PREFIXES = ("val", "valid", "validation", "train", "test")


def similar_name(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that ``name`` probably misspells.

    Recognizes a typo (``val_acuracy``), an abbreviation (``val_acc``), another or a missing prefix
    (``accuracy`` for ``val_accuracy``) and other separators. Names that differ in their numbers are
    different names.

    Args:
        name: the name to look up.
        known: the valid names.

    Returns:
        The similar name; None if ``name`` is valid itself or no valid name is similar.
    """
    candidates = list(known)
    if name in candidates:
        return None
    wanted = _normalized(name)
    for candidate in candidates:
        other = _normalized(candidate)
        same_without_prefix = _without_prefix(wanted) == _without_prefix(other)
        if len(wanted) >= 3 and (other.startswith(wanted) or same_without_prefix):
            return candidate
    return next((each for each in candidates if _is_typo(wanted, _normalized(each))), None)


def _is_typo(wanted: str, other: str) -> bool:
    if re.sub(r"[0-9]", "", wanted) == re.sub(r"[0-9]", "", other):
        return False
    swapped = sorted(wanted) == sorted(other) and wanted[:1] == other[:1] and len(wanted) > 3
    return swapped or difflib.SequenceMatcher(None, wanted, other).ratio() >= _MIN_SIMILARITY


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _without_prefix(name: str) -> str:
    first, _, rest = name.partition("_")
    return rest if first in _PREFIXES and rest else name


FREE = ("model", "data")
"""Sections for the user's own settings: they are neither renamed nor checked."""

# Accepted in every checked section and at the top level.
_ALIASES = {
    "enable_multi_gpu": "distributed.enabled",
    "grad_accum_steps": "train.gradient_accumulation_steps",
    "grad_accumulation": "train.gradient_accumulation_steps",
    "mode": "distributed.strategy",
    "multi_gpu_backend": "distributed.backend",
    "multi_gpu_bucket_cap_mb": "distributed.bucket_cap_mb",
    "multi_gpu_device_ids": "distributed.device_ids",
    "multi_gpu_find_unused_parameters": "distributed.find_unused_parameters",
    "multi_gpu_mode": "distributed.strategy",
    "multi_gpu_static_graph": "distributed.static_graph",
    "num_gpus": "distributed.world_size",
    "sync_bn": "distributed.sync_batchnorm",
}

# Other tools' names of our settings: rejected with our name.
_NAMED_HERE = {
    "accumulate_grad_batches": "train.gradient_accumulation_steps",
    "batch_size_per_gpu": "train.batch_size_per_device",
    "bf16": "train.precision",
    "checkpoint_frequency": "checkpoint.every_epochs",
    "communication_backend": "distributed.backend",
    "enable_multi_gpu_monitoring": "tracking.device_metrics",
    "fp16": "train.precision",
    "global_batch_size": "train.batch_size",
    "gpus_per_node": "distributed.world_size",
    "gradient_clipping": "train.max_grad_norm",
    "learning_rate": "optim.lr",
    "master_port": "distributed.port",
    "mixed_precision": "train.precision",
    "mlflow_experiment": "tracking.experiment",
    "mlflow_tracking": "tracking.mlflow",
    "num_epochs": "train.epochs",
    "num_gpus_per_node": "distributed.world_size",
    "num_processes": "distributed.world_size",
    "per_device_batch_size": "train.batch_size_per_device",
    "per_device_train_batch_size": "train.batch_size_per_device",
    "timeout_seconds": "distributed.timeout",
}

# The argument `processes` in accelerate, torch.multiprocessing.spawn and torchrun.
_PROCESSES = {
    *("num_processes", "nprocs", "nproc_per_node"),
    *("num_gpus", "gpus_per_node", "num_gpus_per_node"),
}


def refuse_other_launchers_names(function: Callable[P, T]) -> Callable[P, T]:
    """Make an argument that is another launcher's name for ``processes`` an error that says so.

    Args:
        function: launches ranks. If it has no argument ``processes``, the error names the setting.
    """
    takes_processes = "processes" in inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        __tracebackhide__ = True
        for name in _PROCESSES.intersection(options):
            value = options[name]
            argument = f"processes={value!r}"
            setting = f'config.with_overrides({{"distributed.world_size": {value!r}}})'
            raise LaunchError(
                f"{function.__name__} has no argument {name!r}",
                allowed="processes" if takes_processes else "the setting distributed.world_size",
                do=f"pass {argument if takes_processes else setting}",
            )
        return function(*args, **options)

    return call


# Arguments of torch's optimizers; they belong under optim.options, with their own names.
_OPTIMIZER_ARGUMENTS = """
alpha amsgrad betas centered dampening eps fused initial_accumulator_value lr_decay maximize
momentum_decay nesterov rho
"""

_REMOVE = "remove it"
_SEVERAL_NODES = (
    "start your script on every machine with torchrun or srun; its nb.launch trains there"
)
_RELAUNCH = "call nb.launch again: it resumes the unfinished run"

_RECIPES = "docs/own-loop/pipeline.md"

# Names that are rejected, why, and what to do instead.
_REFUSALS = (
    ("rank local_rank node_rank", "is set by the launcher for each process", _REMOVE),
    ("init_method", "can only be env://: the launcher sets the rendezvous address", _REMOVE),
    ("num_nodes", "can only be 1 (for a job on a cluster, see cluster.nodes)", _SEVERAL_NODES),
    ("master_addr", "can only be localhost: the ranks run on this machine", _SEVERAL_NODES),
    (
        "launch_method",
        "is an argument of the call",
        'nb.launch(..., start="forkserver" | "inline")',
    ),
    (
        "output_device dim",
        "belongs to DataParallel: nbtoolkit divides along dimension 0 and gathers on the first "
        "device",
        _REMOVE,
    ),
    (
        "deepspeed_config",
        "is DeepSpeed's own file; nbtoolkit trains as ZeRO does with torch's fsdp",
        "set distributed.zero_stage and distributed.offload",
    ),
    (
        "enable_hybrid hybrid_strategy",
        "belongs to a hybrid mode (which divides the model over devices)",
        "set distributed.strategy: hybrid",
    ),
    (
        "local_sgd_steps",
        "belongs to local SGD, which is a loop of your own here",
        f"write that loop (see {_RECIPES}), or set distributed.compression: powersgd",
    ),
    ("enable_gradient_synchronization", "cannot be off: DDP always does it", _REMOVE),
    (
        "enable_fault_tolerance",
        "does not exist: a rank's failure always ends the run and raises",
        _RELAUNCH,
    ),
    ("max_retries", "does not exist: nbtoolkit does not repeat a failed run", _RELAUNCH),
    (
        "checkpoint_dir storage_path tensorboard_dir",
        "cannot be set by itself",
        "set runtime.output_dir: each run has its own folder there, with all its files",
    ),
    (
        "resume_from_checkpoint auto_resume",
        "is an argument of the call",
        'nb.launch(..., resume="never")',
    ),
    (
        "trials_per_gpu k_fold early_termination sampling study space budget",
        "belongs to a sweep",
        "put it into the sweep's own file (config/hpo/...), or pass it to nb.sweep",
    ),
    (
        "distributed.batch_size",  # `batch_size` alone is a setting of nbtoolkit
        "is ambiguous",
        "set train.batch_size (over all ranks) or train.batch_size_per_device (of one rank)",
    ),
)
_REFUSED = {name: (why, do) for names, why, do in _REFUSALS for name in names.split()}

_CHOICES = ("train.precision", "distributed.strategy", "distributed.backend")

# Modes of other tools -> our strategies.
_MODES = {
    "none": "single",
    "distributed": "ddp",
    "dataparallel": "dp",
    "data_parallel": "dp",
}

_HOROVOD = "Horovod's last release is of 2023; the strategy ddp also averages the gradients"
_RAY = 'it is not a strategy or backend; for a Ray cluster, pass where="ray" to nb.launch'

# Rejected values and the reason.
_REFUSED_VALUES = {
    "distributed.strategy": {
        "pipeline": f"a pipeline is a loop of your own, see {_RECIPES}",
        "local_sgd": f"local SGD is a loop of your own, see {_RECIPES}",
        "ray": _RAY,
        "horovod": _HOROVOD,
        "tensorflow": "set distributed.backend: tensorflow instead",
    },
    "distributed.backend": {
        "pytorch-ddp": "set distributed.strategy: ddp instead",
        "mpi": "torch has it only when built from source with MPI",
        "horovod": _HOROVOD,
        "ray": _RAY,
    },
}


def canonical(layer: Layer, fields: dict[str, str]) -> Layer:
    """Rename a layer's settings to our names; each rejected name becomes a mistake of the layer.

    Args:
        layer: settings as written, in sections or flat at the top level.
        fields: every checked dotted name and what it allows.
    """
    renamer = _Renamer(layer, fields)
    for name, value in layer.values.items():
        renamer.add(name, value)
    return Layer(values=renamer.values, places=renamer.places, mistakes=tuple(renamer.mistakes))


def nearest(dotted: str, known: Iterable[str]) -> str:
    """Find the known dotted name most similar to ``dotted``: same last part, else similar spelling.

    Returns:
        The name; an empty string if none is similar.
    """
    section, last = dotted.rpartition(".")[0], dotted.rpartition(".")[2].lower()
    if section in ("", "optim") and last in _OPTIMIZER_ARGUMENTS.split():
        return f"optim.options.{last}"
    others = {**_ALIASES, **_NAMED_HERE}
    names = {f"{section}.{other}".lstrip("."): name for other, name in others.items()}
    names.update({name: name for name in known})
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    if last in by_last:
        return names[by_last[last]]
    close = difflib.get_close_matches(dotted.lower(), names, n=1, cutoff=0.6)
    close = close or [
        by_last[part] for part in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)
    ]
    return names[close[0]] if close else ""


class _Renamer:
    """Collects one layer's settings under our names."""

    def __init__(self, layer: Layer, fields: dict[str, str]) -> None:
        self._layer, self._fields = layer, fields
        self._sections = {name.partition(".")[0] for name in fields if "." in name} | set(FREE)
        self.values: dict[str, Any] = {}
        self.places: dict[Keys, str] = {}
        self.mistakes = list(layer.mistakes)

    def add(self, name: str, value: object) -> None:
        """Add one top-level entry: a section, or a single setting."""
        if name not in self._sections:
            self._setting((name,), name, value)
        elif value is None:
            return  # `train:` with nothing under it
        elif not isinstance(value, dict):
            what = f"'{name}' is a section, not {value!r}"
            self._refuse((name,), what, allowed="`name: value` lines under it")
        elif name in FREE:
            self.values[name] = value
            self.places.update({k: p for k, p in self._layer.places.items() if k[0] == name})
        else:
            for key, inner in value.items():
                self._setting((name, key), f"{name}.{key}", inner)

    def _setting(self, keys: Keys, dotted: str, value: object) -> None:
        name = keys[-1]
        if dotted in self._fields:
            self._put(dotted, keys, value)
        elif reason := _REFUSED.get(dotted) or _REFUSED.get(name):
            self._refuse(keys, f"'{dotted}' {reason[0]}", do=reason[1])
        elif name in _ALIASES:
            self._put(_ALIASES[name], keys, value)
        elif name in _NAMED_HERE:
            what = f"'{dotted}' is another tool's name of {_NAMED_HERE[name]}"
            self._refuse(keys, what, do=f"set {_NAMED_HERE[name]}")
        else:
            # Unknown; validation reports it with the other unknown names.
            self._put(dotted, keys, value)

    def _put(self, dotted: str, keys: Keys, value: object) -> None:
        value = _our_value(dotted, value)
        reasons = _REFUSED_VALUES.get(dotted, {})
        if isinstance(value, str) and value in reasons:
            what = f"{dotted}: {value!r} is refused: {reasons[value]}"
            self._refuse(keys, what, allowed=self._fields[dotted])
            return
        target = tuple(dotted.split("."))
        section = self.values if len(target) == 1 else self.values.setdefault(target[0], {})
        if target not in self.places:
            section[target[-1]] = value
            self.places[target] = self._place(keys)
        elif section[target[-1]] != value:
            what = f"'{'.'.join(keys)}' sets {dotted}, which {self.places[target]} sets already"
            self._refuse(keys, what, do="keep one of them")

    def _refuse(self, keys: Keys, what: str, *, allowed: str = "", do: str = "") -> None:
        self.mistakes.append(Mistake(place=self._place(keys), what=what, allowed=allowed, do=do))

    def _place(self, keys: Keys) -> str:
        return self._layer.places.get(keys, ".".join(keys))


def _our_value(dotted: str, value: object) -> object:
    """Return a strategy, backend or precision in lower case, and our strategy for a mode."""
    if not isinstance(value, str) or dotted not in _CHOICES:
        return value
    value = value.lower()
    return _MODES.get(value, value) if dotted == "distributed.strategy" else value
