"""Map the names that other launchers use to our settings, and list the names that are refused.

`canonical` rewrites one layer of settings to our names before it is checked, so that a file written
for another tool either works or is told, name by name, where the setting went.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from nbtoolkit.config.yaml_source import Keys, Layer, Mistake

_ALIKE = 0.9  # val_acuracy and val_accuracy: 0.96; val_mae and val_mse: 0.86
_PREFIXES = ("val", "valid", "validation", "train", "test")

RENAMED = {
    "nb.Leave": "nb.RunStopped",
    "nb.over_all": "nb.epoch_metric",
    "ctx.check": "ctx.raise_if_stopped",
    "ctx.leaving": "ctx.should_stop",
    "ctx.long": "ctx.pause_hang_detection",
    "ctx.news": "ctx.stop_requested",
    "ctx.note": "ctx.message",
    "budget.keep_back": "budget.reserve_for_refit",
    "optim.floor": "optim.min_lr_ratio",
    "optim.warmup": "optim.warmup_ratio",
    "repeat_top": "reevaluate_top",
    "runtime.reserve": "runtime.shutdown_margin",
    "study.value": "study.trial_value",
    "tracking.samples": "tracking.record_samples",
    "train.accumulate": "train.gradient_accumulation_steps",
    "train.average": "train.weight_averaging",
    "train.clip_norm": "train.max_grad_norm",
    "train.patience": "train.early_stopping_patience",
    "train.workers": "train.num_workers",
}
"""Public names and settings of version 0.1 that version 0.2 refuses, and their names now."""


def refuse_old_name(name: str) -> None:
    """Raise an AttributeError that gives the new name, where ``name`` is one of version 0.1."""
    if name in RENAMED:
        raise AttributeError(new_name(name))


def new_name(old: str) -> str:
    """The sentence that gives the new name of a name or setting of version 0.1."""
    return f"{old} is called {RENAMED[old]} since version 0.2"


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is likely meant to be; None: it is one of them, or like none.

    A slip (``val_acuracy``), a name cut short (``val_acc``), another or no prefix (``accuracy`` for
    ``val_accuracy``), other signs between the words. Names that differ in numbers are different.

    Args:
        name: what somebody wrote.
        known: what there is.
    """
    there = list(known)
    if name in there:
        return None
    wanted = _plain(name)
    for one in there:
        other = _plain(one)
        if len(wanted) >= 3 and (other.startswith(wanted) or _bare(wanted) == _bare(other)):
            return one
    close = [one for one in there if _slip(wanted, _plain(one))]
    return close[0] if close else None


def _slip(wanted: str, other: str) -> bool:
    if re.sub(r"[0-9]", "", wanted) == re.sub(r"[0-9]", "", other):
        return False
    swapped = sorted(wanted) == sorted(other) and wanted[:1] == other[:1] and len(wanted) > 3
    return swapped or difflib.SequenceMatcher(None, wanted, other).ratio() >= _ALIKE


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _bare(name: str) -> str:
    first, _, rest = name.partition("_")
    return rest if first in _PREFIXES and rest else name


FREE = ("model", "data")
"""Sections that belong to the user: nothing in them is renamed or checked."""

# Another name -> ours. It holds in every checked section and at the top level.
_ALIASES = {
    "grad_accumulation": "train.gradient_accumulation_steps",
    "grad_accum_steps": "train.gradient_accumulation_steps",
    "accumulate_grad_batches": "train.gradient_accumulation_steps",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "mixed_precision": "train.precision",
    "gradient_clipping": "train.max_grad_norm",
    "per_device_batch_size": "train.batch_size_per_device",
    "per_device_train_batch_size": "train.batch_size_per_device",
    "batch_size_per_gpu": "train.batch_size_per_device",
    "global_batch_size": "train.batch_size",
    "num_epochs": "train.epochs",
    "learning_rate": "optim.lr",
    "sync_bn": "distributed.sync_batchnorm",
    "mode": "distributed.strategy",
    "communication_backend": "distributed.backend",
    "master_port": "distributed.port",
    "timeout_seconds": "distributed.timeout",
    "num_gpus": "distributed.world_size",
    "num_processes": "distributed.world_size",
    "gpus_per_node": "distributed.world_size",
    "num_gpus_per_node": "distributed.world_size",
    "enable_multi_gpu": "distributed.enabled",
    "multi_gpu_mode": "distributed.strategy",
    "multi_gpu_device_ids": "distributed.device_ids",
    "multi_gpu_backend": "distributed.backend",
    "multi_gpu_find_unused_parameters": "distributed.find_unused_parameters",
    "multi_gpu_bucket_cap_mb": "distributed.bucket_cap_mb",
    "multi_gpu_static_graph": "distributed.static_graph",
    "checkpoint_frequency": "checkpoint.every_epochs",
    "mlflow_tracking": "tracking.mlflow",
    "mlflow_experiment": "tracking.experiment",
    "enable_multi_gpu_monitoring": "tracking.device_metrics",
}

# Arguments of torch's optimizers: they stand under optim.options, by their own names.
_OPTIMIZER_ARGUMENTS = (
    "alpha",
    "amsgrad",
    "betas",
    "centered",
    "dampening",
    "eps",
    "fused",
    "initial_accumulator_value",
    "lr_decay",
    "maximize",
    "momentum_decay",
    "nesterov",
    "rho",
)

# Names that may stand there with these values, and then say nothing new.
_ALREADY_SO: dict[str, tuple[Any, ...]] = {
    "init_method": ("env://",),
    "num_nodes": (1,),
    "master_addr": ("localhost", "127.0.0.1"),
    "enable_gradient_synchronization": (True,),
    "resume_from_checkpoint": (True,),
    "auto_resume": (True,),
}

_POSITION = "is a process's position, set by the launcher for each of them"
_SEVERAL_NODES = (
    "start the program on every machine with torchrun or srun; nb.launch then runs in place"
)
_RUN_FOLDER = "set runtime.output_dir: each run has a folder of its own in it, with all its files"
_SWEEP = "belongs to a sweep"
_SWEEP_FILE = "put it into the sweep's own file (config/hpo/...), or give it to the call"
_TAKE_OUT = "take it out"

# Names we know and refuse: why, and what to do instead.
_REFUSED = {
    "rank": (_POSITION, _TAKE_OUT),
    "local_rank": (_POSITION, _TAKE_OUT),
    "node_rank": (_POSITION, _TAKE_OUT),
    "init_method": (
        "can only be env://: the launcher hands the ranks their meeting point",
        _TAKE_OUT,
    ),
    "num_nodes": ("can only be 1: nb.launch starts processes on this machine", _SEVERAL_NODES),
    "master_addr": ("can only be localhost: the ranks run on this machine", _SEVERAL_NODES),
    "launch_method": (
        "is chosen with the call",
        'nb.launch(..., start="forkserver" | "fork" | "inline"); under torchrun it runs in place',
    ),
    "output_device": ("belongs to DataParallel, which is not used here", _TAKE_OUT),
    "dim": ("belongs to DataParallel, which is not used here", _TAKE_OUT),
    "zero_stage": (
        "belongs to DeepSpeed, which is not used here",
        "strategy: ddp is what there is",
    ),
    "deepspeed_config": (
        "belongs to DeepSpeed, which is not used here",
        "strategy: ddp is what there is",
    ),
    "enable_hybrid": ("mixes DataParallel and DDP, which gains nothing", "use strategy: ddp"),
    "hybrid_strategy": ("mixes DataParallel and DDP, which gains nothing", "use strategy: ddp"),
    "enable_gradient_synchronization": ("cannot be off: DDP always does it", _TAKE_OUT),
    "enable_fault_tolerance": (
        "is not a switch: a rank's failure always ends the run and raises",
        "call nb.launch again: it resumes the unfinished run",
    ),
    "max_retries": (
        "is not known: a failed run is not repeated behind your back",
        "call nb.launch again: it resumes the unfinished run",
    ),
    "checkpoint_dir": ("is not chosen alone", _RUN_FOLDER),
    "storage_path": ("is not chosen alone", _RUN_FOLDER),
    "tensorboard_dir": ("is not chosen alone", _RUN_FOLDER),
    "resume_from_checkpoint": ("is chosen with the call", 'nb.launch(..., resume="never")'),
    "auto_resume": ("is chosen with the call", 'nb.launch(..., resume="never")'),
    "trials_per_gpu": (_SWEEP, _SWEEP_FILE),
    "k_fold": (_SWEEP, _SWEEP_FILE),
    "early_termination": (_SWEEP, _SWEEP_FILE),
    "sampling": (_SWEEP, _SWEEP_FILE),
    "study": (_SWEEP, _SWEEP_FILE),
    "space": (_SWEEP, _SWEEP_FILE),
    "budget": (_SWEEP, _SWEEP_FILE),
}

# In one place only: elsewhere these names are ours.
_REFUSED_HERE = {
    "distributed.batch_size": (
        "does not say whose batch it is",
        "train.batch_size is all ranks' together, train.batch_size_per_device that of one",
    ),
}

_CHOICES = ("train.precision", "distributed.strategy", "distributed.backend")

# Values of ours that other tools write differently.
_VALUES: dict[str, dict[Any, Any]] = {
    "train.precision": {True: "auto", False: "fp32", "no": "fp32"},
    "distributed.strategy": {"none": "single", "distributed": "ddp", "pytorch-ddp": "ddp"},
}

_DATA_PARALLEL = "DataParallel gathers outputs and gradients on GPU 0; torch itself advises DDP"
_NOT_YET = "not built in: inside train() you may use it yourself through ctx.accelerator or torch"

# Values we know and refuse, with the reason.
_REFUSED_VALUES = {
    "distributed.strategy": {
        "dp": _DATA_PARALLEL,
        "dataparallel": _DATA_PARALLEL,
        "data_parallel": _DATA_PARALLEL,
        "hybrid": "a mix of DataParallel and DDP gains nothing",
        "fsdp": _NOT_YET,
        "fsdp2": _NOT_YET,
        "deepspeed": _NOT_YET,
        "pipeline": _NOT_YET,
        "ray": "nbtoolkit starts the ranks itself; on Ray it was never tried",
        "horovod": "Horovod's last release is of 2023; DDP does the same",
        "tensorflow": "nbtoolkit trains with PyTorch",
    },
    "distributed.backend": {
        "mpi": "torch has it only when built from source with MPI",
        "horovod": "Horovod's last release is of 2023; DDP does the same",
        "ray": "nbtoolkit starts the ranks itself; on Ray it was never tried",
        "tensorflow": "nbtoolkit trains with PyTorch",
    },
}


def canonical(layer: Layer, fields: dict[str, str]) -> Layer:
    """The layer in our names; what is refused by name becomes a mistake.

    Args:
        layer: settings as written: sections of settings, or the same flat at the top level.
        fields: every checked dotted name with what it allows.
    """
    renamer = _Renamer(layer, fields)
    for section, value in layer.values.items():
        renamer.take(section, value)
    return Layer(values=renamer.values, places=renamer.places, mistakes=tuple(renamer.mistakes))


def nearest(dotted: str, known: Iterable[str]) -> str:
    """The known dotted name most like ``dotted``: its last word elsewhere, else a near spelling.

    Returns:
        The name, or an empty text when none is near.
    """
    section, last = dotted.rpartition(".")[0], dotted.rpartition(".")[2].lower()
    if section in ("", "optim") and last in _OPTIMIZER_ARGUMENTS:
        return f"optim.options.{last}"
    means = {f"{section}.{alias}".lstrip("."): name for alias, name in _ALIASES.items()}
    means.update({name: name for name in known})
    by_last = {name.rpartition(".")[2]: name for name in reversed(means)}
    if last in by_last:
        return means[by_last[last]]
    whole = difflib.get_close_matches(dotted.lower(), means, n=1, cutoff=0.6)
    parts = difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)
    close = whole or [by_last[part] for part in parts]
    return means[close[0]] if close else ""


class _Renamer:
    """Collects one layer's settings under our names."""

    def __init__(self, layer: Layer, fields: dict[str, str]) -> None:
        self._layer, self._fields = layer, fields
        self._sections = {name.partition(".")[0] for name in fields if "." in name} | set(FREE)
        self.values: dict[str, Any] = {}
        self.places: dict[Keys, str] = {}
        self.mistakes = list(layer.mistakes)

    def take(self, name: str, value: Any) -> None:
        """Take one top-level entry: a section, or a single setting."""
        if name not in self._sections:
            self._setting((name,), name, value)
        elif value is None:
            return  # `train:` with nothing under it
        elif not isinstance(value, dict):
            what = f"'{name}' is a section, not {value!r}"
            allowed = "`name: value` lines under it"
            self.mistakes.append(Mistake(place=self._place((name,)), what=what, allowed=allowed))
        elif name in FREE:
            self.values[name] = value
            self.places.update({k: p for k, p in self._layer.places.items() if k[0] == name})
        else:
            for key, inner in value.items():
                self._setting((name, key), f"{name}.{key}", inner)

    def _setting(self, keys: Keys, dotted: str, value: Any) -> None:
        name = keys[-1]
        if dotted in self._fields:
            self._put(dotted, keys, value)
        elif dotted in RENAMED:
            self._refuse(keys, new_name(dotted), do="rename it")
        elif value in _ALREADY_SO.get(name, ()):
            return
        elif reason := _REFUSED_HERE.get(dotted) or _REFUSED.get(name):
            self._refuse(keys, f"'{dotted}' {reason[0]}", do=reason[1])
        elif name in _ALIASES:
            is_switch = value is True and name in ("fp16", "bf16")
            self._put(_ALIASES[name], keys, name if is_switch else value)
        else:
            self._put(dotted, keys, value)  # unknown: told with the other unknown names

    def _put(self, dotted: str, keys: Keys, value: Any) -> None:
        dotted, value = _our_value(dotted, value)
        target = tuple(dotted.split("."))
        if reason := _refused_value(dotted, value):
            allowed = self._fields[dotted]
            self._refuse(keys, f"{dotted}: {value!r} is refused: {reason}", allowed=allowed)
            return
        if target in self.places:
            if self._taken(target) == value:
                return  # num_gpus: 2 and gpus_per_node: 2 say the same
            what = f"'{'.'.join(keys)}' sets {dotted}, which {self.places[target]} sets already"
            self._refuse(keys, what, do="keep one of them")
            return
        into = self.values if len(target) == 1 else self.values.setdefault(target[0], {})
        into[target[-1]] = value
        self.places[target] = self._place(keys)

    def _taken(self, target: Keys) -> Any:
        return self.values[target[0]] if len(target) == 1 else self.values[target[0]][target[-1]]

    def _refuse(self, keys: Keys, what: str, *, allowed: str = "", do: str = "") -> None:
        place = self._place(keys)
        self.mistakes.append(Mistake(place=place, what=what, allowed=allowed, do=do))

    def _place(self, keys: Keys) -> str:
        return self._layer.places.get(keys, ".".join(keys))


def _our_value(dotted: str, value: Any) -> tuple[str, Any]:
    """The setting as we write it: other tools' words translated, choices in small letters."""
    if dotted in _CHOICES and isinstance(value, (str, bool)):
        value = value.lower() if isinstance(value, str) else value
        value = _VALUES.get(dotted, {}).get(value, value)
        if (dotted, value) == ("distributed.backend", "pytorch-ddp"):
            return "distributed.strategy", "ddp"
    return dotted, value


def _refused_value(dotted: str, value: Any) -> str:
    reasons = _REFUSED_VALUES.get(dotted, {})
    return reasons.get(value, "") if isinstance(value, str) else ""
