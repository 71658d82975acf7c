"""List the names of other launchers that mean a setting of ours, and those that are refused.

The key `name` is a setting, in any checked section or at the top level, and the key
`setting: value` a value of a setting. The module also finds the name that a wrong one misspells.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from nbtoolkit.errors import LaunchError

P = ParamSpec("P")
T = TypeVar("T")

MEANINGS = {
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
    "strategy: data_parallel": "dp",
    "strategy: dataparallel": "dp",
    "strategy: distributed": "ddp",
    "strategy: none": "single",
    "sync_bn": "distributed.sync_batchnorm",
}
"""Names that are read as ours."""

_CALL = "is an argument of the call"
_HOROVOD = "Horovod's last release is of 2023; set strategy: ddp, which averages the gradients, too"
_HYBRID = "belongs to a mode that divides the model over devices; set distributed.strategy: hybrid"
_ONE_MACHINE = "start your script on each machine with torchrun or srun: nb.launch trains there"
_OWN_LOOP = "is a loop of your own; see docs/own-loop/pipeline.md"
_PARALLEL = "belongs to DataParallel, which gathers dimension 0 on the first device; remove it"
_RANK = "is set by the launcher for each process; remove it"
_RAY = 'Ray is no strategy or backend; pass where="ray" to nb.launch for a Ray cluster'
_RUN_FOLDER = "cannot be set by itself; set runtime.output_dir: it has a folder for each run"
_SWEEP = "belongs to a sweep; put it into the sweep's own file, or pass it to nb.sweep"

REFUSALS = {
    "accumulate_grad_batches": "train.gradient_accumulation_steps",
    "auto_resume": f'{_CALL}; nb.launch(..., resume="never")',
    "backend: horovod": _HOROVOD,
    "backend: mpi": "torch has it only when built from source with MPI",
    "backend: pytorch-ddp": "set distributed.strategy: ddp instead",
    "backend: ray": _RAY,
    "batch_size_per_gpu": "train.batch_size_per_device",
    "bf16": "train.precision",
    "budget": _SWEEP,
    "checkpoint_dir": _RUN_FOLDER,
    "checkpoint_frequency": "checkpoint.every_epochs",
    "communication_backend": "distributed.backend",
    "deepspeed_config": "is DeepSpeed's own file; set distributed.zero_stage and .offload: torch's "
    "fsdp then trains as ZeRO does",
    "dim": _PARALLEL,
    "distributed.batch_size": "is ambiguous; set train.batch_size (over all ranks) or "
    "train.batch_size_per_device (of one rank)",
    "early_termination": _SWEEP,
    "enable_fault_tolerance": "runtime.restarts",
    "enable_gradient_synchronization": "cannot be off, because DDP always does it; remove it",
    "enable_hybrid": _HYBRID,
    "enable_multi_gpu_monitoring": "tracking.device_metrics",
    "fp16": "train.precision",
    "global_batch_size": "train.batch_size",
    "gpus_per_node": "distributed.world_size",
    "gradient_clipping": "train.max_grad_norm",
    "hybrid_strategy": _HYBRID,
    "init_method": "can only be env://: the launcher sets the rendezvous address; remove it",
    "k_fold": _SWEEP,
    "launch_method": f'{_CALL}; nb.launch(..., start="forkserver" | "inline")',
    "learning_rate": "optim.lr",
    "local_rank": _RANK,
    "local_sgd_steps": f"{_OWN_LOOP}, or set distributed.compression: powersgd",
    "master_addr": f"can only be localhost: the ranks run on this machine; {_ONE_MACHINE}",
    "master_port": "distributed.port",
    "max_retries": "runtime.restarts",
    "mixed_precision": "train.precision",
    "mlflow_experiment": "tracking.experiment",
    "mlflow_tracking": "tracking.mlflow",
    "node_rank": _RANK,
    "num_epochs": "train.epochs",
    "num_gpus_per_node": "distributed.world_size",
    "num_nodes": f"can only be 1 (for a job on a cluster, see cluster.nodes); {_ONE_MACHINE}",
    "num_processes": "distributed.world_size",
    "output_device": _PARALLEL,
    "per_device_batch_size": "train.batch_size_per_device",
    "per_device_train_batch_size": "train.batch_size_per_device",
    "rank": _RANK,
    "resume_from_checkpoint": f'{_CALL}; nb.launch(..., resume="never")',
    "sampling": _SWEEP,
    "space": _SWEEP,
    "storage_path": _RUN_FOLDER,
    "strategy: horovod": _HOROVOD,
    "strategy: local_sgd": f"local SGD {_OWN_LOOP}",
    "strategy: pipeline": f"a pipeline {_OWN_LOOP}",
    "strategy: ray": _RAY,
    "strategy: tensorflow": "set distributed.backend: tensorflow instead",
    "study": _SWEEP,
    "tensorboard_dir": _RUN_FOLDER,
    "timeout_seconds": "distributed.timeout",
    "trials_per_gpu": _SWEEP,
}
"""Names that are refused: our name, or the reason and, after a semicolon, the way out."""

# Arguments of torch's optimizers; they belong under optim.options, with their own names.
_OPTIMIZER_ARGUMENTS = """
alpha amsgrad betas centered dampening eps fused initial_accumulator_value lr_decay maximize
momentum_decay nesterov rho
"""

# The argument `processes` in accelerate, torch.multiprocessing.spawn and torchrun.
_PROCESSES = {
    *("num_processes", "nprocs", "nproc_per_node"),
    *("num_gpus", "gpus_per_node", "num_gpus_per_node"),
}

# Similarity of val_acuracy and val_accuracy: 0.96; of val_mae and val_mse: 0.86.
_MIN_SIMILARITY = 0.9
_PREFIXES = ("val", "valid", "validation", "train", "test")


def nearest(dotted: str, known: Iterable[str]) -> str:
    """Find the known dotted name most similar to ``dotted``: same last part, else similar spelling.

    Returns:
        The name; an empty string if none is similar.
    """
    section = dotted.rpartition(".")[0]
    last = dotted.rpartition(".")[2].lower()
    if section in ("", "optim") and last in _OPTIMIZER_ARGUMENTS.split():
        return f"optim.options.{last}"
    settings = set(known)
    others = {other: name for other, name in {**MEANINGS, **REFUSALS}.items() if name in settings}
    names = {f"{section}.{other}".lstrip("."): name for other, name in others.items()}
    names.update({name: name for name in known})
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    if last in by_last:
        return names[by_last[last]]
    # A long section alone makes two names similar: the last parts must be, too ("rl" and "lr").
    similar = difflib.get_close_matches(dotted.lower(), names, n=3, cutoff=0.6)
    least = 0.6 if len(last) > 3 else 0.5
    parts = difflib.get_close_matches(last, by_last, n=len(by_last), cutoff=least)
    close = [name for name in similar if name.rpartition(".")[2] in parts]
    close += [by_last[part] for part in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)]
    return names[close[0]] if close else ""


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
