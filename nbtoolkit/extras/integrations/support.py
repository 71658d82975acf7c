"""Check versions and names, record checkpoints and find the last one, for all integrations."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from nbtoolkit.environment.installed import installed_version
from nbtoolkit.environment.variables import RANK_MARK
from nbtoolkit.errors import (
    CheckpointError,
    FitError,
    LaunchError,
    MissingExtra,
    PlanError,
)
from nbtoolkit.run.checkpoints.checkpoint_store import State, read_state
from nbtoolkit.worker.context import RunContext

if TYPE_CHECKING:
    from nbtoolkit.launcher.run_result import RunResult


def check_strategy(ctx: RunContext, framework: str) -> None:
    """Check that a framework's own DDP does what the plan says.

    Raises:
        PlanError: the plan has a strategy of ``nb.fit``.
    """
    if ctx.plan.strategy == "fsdp":
        raise PlanError(
            f"the plan's strategy is fsdp, and {framework} would train with DDP",
            allowed="distributed.strategy: auto, single or ddp",
            do="set distributed.strategy: ddp, or train with nb.fit",
        )


def refuse_ranks(ctx: RunContext, framework: str) -> None:
    """Refuse a run of several ranks: each would train the same model.

    Raises:
        PlanError: the run has several ranks.
    """
    if ctx.world_size > 1:
        raise PlanError(
            f"{framework} trains in one process here, and this run has {ctx.world_size} ranks, "
            "which would all train the same model",
            allowed="one process; it uses the CPU cores of the plan, or one GPU",
            do="nb.launch(train, config, processes=1), or set distributed.world_size: 1",
        )


@contextmanager
def requires(package: str, minimum: str) -> Iterator[None]:
    """Import a framework inside the block.

    Args:
        package: its distribution. Of a build with another name, such as ``tensorflow-cpu``, the
            version is not checked.
        minimum: the oldest version that works, as ``"2.5"``.

    Raises:
        MissingExtra: it is not installed, too old, or cannot be imported.
    """
    installed = installed_version(package)
    try:
        if installed is not None and Version(installed) < Version(minimum):
            raise ImportError(f"{package} {installed} is installed")
        yield
    except ImportError as error:
        raise MissingExtra(
            f"nbtoolkit.integrations needs {package} {minimum} or newer: {error}",
            do=f"pip install -U '{package}>={minimum}'",
        ) from error


def check_inside_train(ctx: object, call: str) -> None:
    """Refuse a ``ctx`` that is none, or one that is used outside its training function.

    Raises:
        LaunchError: this is the kernel, or ``ctx`` is not a run context.
    """
    if isinstance(ctx, RunContext) and RANK_MARK in os.environ:
        return
    given = "outside of train" if isinstance(ctx, RunContext) else f"with {type(ctx).__name__!r}"
    raise LaunchError(
        f"{call}(ctx) was called {given}, and the trainer would use the kernel's devices",
        allowed="the ctx of train(config, ctx), inside this function",
        do="make the trainer inside train, and start it with nb.launch(train, config)",
    )


def as_numbers(metrics: Mapping[str, Any], training: str) -> dict[str, float]:
    """Those of a training's metrics that are numbers or tensors of one element, with its name."""
    prefix = "" if training == "trainer" else f"{training}_"
    return {
        f"{prefix}{name}": float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) or _elements(value) == 1
    }


def _elements(value: object) -> object:
    """Return the number of elements of a tensor or an array; None of anything else."""
    count = getattr(value, "numel", getattr(value, "size", None))
    return count() if callable(count) else count


def claim_name(ctx: RunContext, training: str, step: int | None = None) -> None:
    """Claim the name of a training, once in a process.

    Args:
        ctx: the run's context.
        training: the name.
        step: optimizer steps done, to warn of a trainer that has not loaded the checkpoint of
            an interrupted run; None: it is loaded elsewhere.

    Raises:
        FitError: another training of this run has the same name.
    """
    check_name_unused(ctx, training)
    _used_names(ctx).add(training)
    if step == 0 and recorded_trainings(ctx).get(training, {}).get("step"):
        missed = "the run resumes, and its trainer begins anew: pass it resume_from(ctx)"
        ctx.message(missed, "warning")


def check_name_unused(ctx: RunContext, training: str) -> None:
    """Check that no training of this name has started in this process.

    Raises:
        FitError: one has; a second one would continue from its checkpoints.
    """
    if training in _used_names(ctx):
        raise FitError(
            f"two trainings of one run would write the checkpoints of {training!r}",
            allowed="a name for each training of a run",
            do='pass name="..." in each call of nbtoolkit for it, or launch a run for each',
        )


def _used_names(ctx: RunContext) -> set[str]:
    """Return the names of the trainings that have started.

    In the context, since a process runs trials.
    """
    names: set[str] = vars(ctx).setdefault("_training_names", set())
    return names


def record_checkpoint(
    ctx: RunContext, path: Path, step: int, training: str, *, suffix: str = "", **more: object
) -> None:
    """Make a framework's checkpoint the one to resume from; **all** ranks call it.

    Args:
        ctx: the run's context.
        path: a file or folder that is complete, below ``ctx.paths.checkpoints`` or elsewhere.
        step: optimizer steps done.
        training: the name of the training.
        suffix: of files or folders ``<training>-<step, 9 digits><suffix>`` below
            ``ctx.paths.checkpoints``: all but the newest ``checkpoint.keep_last`` are removed.
            Empty: none are.
        more: plain values and tensors to keep beside it.
    """
    name = os.path.relpath(path, ctx.paths.checkpoints)
    trainings = recorded_trainings(ctx)
    trainings[training] = {"path": name, "step": step, **more}
    ctx.save({"trainings": {**trainings}}, step=step)
    # Not those of a training "tuning-2" with the ones of "tuning".
    pattern = f"{glob.escape(training)}-{'[0-9]' * 9}{suffix}"
    checkpoints = sorted(ctx.paths.checkpoints.glob(pattern)) if suffix and ctx.is_main else []
    for old in checkpoints[: -ctx.config.checkpoint.keep_last]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


def recorded_trainings(ctx: RunContext) -> dict[str, State]:
    """Return the last :func:`record_checkpoint` of each training of this run, by its name.

    Raises:
        CheckpointError: the run's last checkpoint is not a trainer's.
    """
    # In the context, so that it goes with it: a process runs many trials.
    if "_trainings" not in vars(ctx):
        state = ctx.load()
        vars(ctx)["_trainings"] = {} if state is None else _trainings(state)
    trainings: dict[str, State] = vars(ctx)["_trainings"]
    return trainings


def resume_from(ctx: RunContext, *, name: str = "trainer") -> Path | None:
    """Return the checkpoint of the framework that a resumed run continues; None: a new run.

    Args:
        ctx: the run's context.
        name: of the training; for several in one run.

    Raises:
        CheckpointError: it is missing, or the run's last checkpoint is not the framework's.
        FitError: another training of this run has the same name.
        LaunchError: called outside of ``train``.
    """
    check_inside_train(ctx, "resume_from")
    check_name_unused(ctx, name)
    return last_checkpoint(ctx, name=name) if name in recorded_trainings(ctx) else None


def last_checkpoint(
    run: str | os.PathLike[str] | RunResult | RunContext, *, name: str | None = None
) -> Path:
    """Return the last checkpoint of the framework in a run, to load its model in the notebook.

    Args:
        run: a result of ``nb.launch``, or the folder of a run, a trial or a fold.
        name: of the training; None: the last one of the run.

    Raises:
        CheckpointError: the run has none.
    """
    paths = getattr(run, "paths", None)
    folder = (Path(run) if paths is None else paths.folder) / "checkpoints"  # type: ignore[arg-type]
    file = folder / "last.pt"
    if not file.exists():
        raise _unusable(f"there is no checkpoint in {folder}")
    trainings = _trainings(read_state(file))
    name = next(reversed(trainings)) if name is None else name
    if name not in trainings:
        raise _unusable(f"no training {name!r} in {folder}, only {', '.join(map(repr, trainings))}")
    path = Path(os.path.normpath(folder / trainings[name]["path"]))
    if not path.exists():
        raise _unusable(f"the trainer's checkpoint {path} is missing")
    return path


def _trainings(state: State) -> dict[str, State]:
    """Return what a state has of each training, by its name; the last one began last."""
    if "trainings" not in state:
        raise _unusable(f"there is no checkpoint of a trainer, only {', '.join(map(str, state))}")
    trainings: dict[str, State] = state["trainings"]
    return trainings


def _unusable(fault: str) -> CheckpointError:
    return CheckpointError(
        fault,
        allowed="a run whose trainer had a callback of nbtoolkit.integrations, with "
        "checkpoint.enabled: true, and all of its checkpoints",
        do='copy them back, or start a new run with resume="never"; save your own state under '
        'another name: ctx.save(state, kind="mine")',
    )
