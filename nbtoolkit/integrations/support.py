"""Check versions, stop within an epoch and find the last checkpoint, for all integrations."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.installed import installed_version
from nbtoolkit.environment.variables import RANK_MARK
from nbtoolkit.errors import CheckpointError, LaunchError, MissingExtra, PlanError, RunStopped
from nbtoolkit.run.checkpoint_store import State, read_state
from nbtoolkit.training.sync import ControlSignal, RankSync
from nbtoolkit.worker.context import RunContext

if TYPE_CHECKING:
    from nbtoolkit.launcher.handle import RunResult


def check_strategy(ctx: RunContext, framework: str) -> None:
    """Check that a framework's own DDP does what the plan says.

    Raises:
        PlanError: the plan has a strategy of ``nb.fit``.
    """
    if ctx.plan.strategy in ("fsdp", "local_sgd"):
        raise PlanError(
            f"the plan's strategy is {ctx.plan.strategy}, and {framework} would train with DDP",
            allowed="distributed.strategy: auto, single or ddp, without local_sgd_steps",
            do="set distributed.strategy: ddp, or train with nb.fit",
        )


def check_version(package: str, minimum: str, extra: str = "") -> None:
    """Check that a framework is installed and new enough.

    Args:
        package: its distribution.
        minimum: the oldest version that works, as ``"2.5"``.
        extra: the extra of this package that installs it; empty: of the same name.

    Raises:
        MissingExtra: it is not installed, or too old.
    """
    found = installed_version(package)
    if found is None or _numbers(found) < _numbers(minimum):
        state = "is not installed" if found is None else f"{found} is installed"
        raise _missing(package, minimum, extra, f"{package} {state}")


@contextmanager
def requires(package: str, minimum: str) -> Iterator[None]:
    """Import a framework inside the block, after a check of its version.

    Args:
        package: its distribution, which is also the name of the extra.
        minimum: the oldest version that works.

    Raises:
        MissingExtra: it is not installed, too old, or cannot be imported.
    """
    check_version(package, minimum)
    try:
        yield
    except ImportError as error:
        raise _missing(package, minimum, "", f"it cannot be imported: {error}") from error


def _missing(package: str, minimum: str, extra: str, reason: str) -> MissingExtra:
    return MissingExtra(
        f"nbtoolkit.integrations needs {package}: {reason}",
        allowed=f"{package} {minimum} or newer",
        do=f"pip install -U 'nbtoolkit-torch[{extra or package}]'",
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:2]]


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


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a framework's metrics that are numbers or tensors of one element."""
    single = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) or getattr(value, "size", None) == 1 or _one(value)
    }
    return {str(name): float(value) for name, value in single.items()}


def _one(value: object) -> bool:
    numel = getattr(value, "numel", None)
    return callable(numel) and numel() == 1


class StepWatch:
    """Decides after each optimizer step whether all ranks save or stop there.

    Several ranks agree about once a second, with a small collective; one rank asks in every step,
    which takes 3 us.

    Args:
        ctx: the run's context.

    Attributes:
        saves: whether checkpoints are written (``checkpoint.enabled``).
    """

    def __init__(self, ctx: RunContext) -> None:
        settings = ctx.config.checkpoint
        self.saves = settings.enabled
        self._ctx, self._saved_at = ctx, time.monotonic()
        self._minutes = settings.every_minutes if self.saves else None
        self._steps = settings.every_steps if self.saves else None
        self._sync = RankSync(ctx, self._steps)

    def begin(self, step: int) -> None:
        """Start to watch, on all ranks, after ``step`` optimizer steps."""
        self._sync.begin(step)
        self.saved()

    def saved(self) -> None:
        """Count ``checkpoint.every_minutes`` from now on."""
        self._saved_at = time.monotonic()

    def signal(self, step: int) -> ControlSignal:
        """What all ranks do after ``step`` optimizer steps; each calls it once for a step."""
        signal = self._own_signal() if self._ctx.is_main else ControlSignal.CONTINUE
        if self._ctx.world_size > 1:
            if step < self._sync.next:
                return ControlSignal.CONTINUE
            signal = self._sync.sync(step, [], signal=signal).signal
        if signal is ControlSignal.CONTINUE and self._steps and step % self._steps == 0:
            return ControlSignal.SAVE
        return signal

    def follow(self, step: int, save: Callable[[], object]) -> None:
        """Do what :meth:`signal` says; may not return.

        Args:
            step: optimizer steps done.
            save: writes a checkpoint, on all ranks.

        Raises:
            RunStopped: the run must stop here; a run that may be resumed is saved.
        """
        signal = self.signal(step)
        if signal is ControlSignal.SAVE:
            save()
        elif signal is ControlSignal.CHECK_STOP and (status := self._ctx.should_stop()):
            if status != "pruned":
                save()
            raise RunStopped(status)

    def _own_signal(self) -> ControlSignal:
        """This rank's view; rank 0's counts."""
        if self._ctx.stop_requested():
            return ControlSignal.CHECK_STOP
        late = self._minutes and time.monotonic() - self._saved_at >= self._minutes * 60
        return ControlSignal.SAVE if late else ControlSignal.CONTINUE


# --- the framework's own checkpoint ---


def record_checkpoint(ctx: RunContext, path: Path, step: int, **more: object) -> None:
    """Make a framework's checkpoint the one to resume from; **all** ranks call it.

    Args:
        ctx: the run's context.
        path: a file or folder that is complete, below ``ctx.paths.checkpoints`` or elsewhere.
        step: optimizer steps done.
        more: plain values and tensors to keep beside it.
    """
    name = os.path.relpath(path, ctx.paths.checkpoints)
    ctx.save({"trainer": name, "step": step, **more}, step=step)


def recorded_state(ctx: RunContext) -> State | None:
    """The last :func:`record_checkpoint` of this run; None: it has none, or it was not made so."""
    state = ctx.load()
    if state is not None and "trainer" not in state:
        raise _not_recorded(ctx.paths.checkpoints / "last.pt", state)
    return state


def resume_from(ctx: RunContext) -> Path | None:
    """The checkpoint of the framework that a resumed run continues; None: a new run.

    Raises:
        CheckpointError: it is missing, or the run's last checkpoint is not the framework's.
        LaunchError: called outside of ``train``.
    """
    check_inside_train(ctx, "resume_from")
    state = recorded_state(ctx)
    return None if state is None else _located(ctx.paths.checkpoints, state)


def last_checkpoint(run: str | os.PathLike[str] | RunResult) -> Path:
    """The last checkpoint of the framework in a run, to load its model in the notebook.

    Args:
        run: a result of ``nb.launch``, or the folder of a run, a trial or a fold.

    Raises:
        CheckpointError: the run has none.
    """
    paths = getattr(run, "paths", None)
    folder = (Path(run) if paths is None else paths.folder) / "checkpoints"  # type: ignore[arg-type]
    file = folder / "last.pt"
    if not file.exists():
        raise CheckpointError(
            f"there is no checkpoint in {folder}",
            allowed="a run whose trainer had a callback of nbtoolkit.integrations",
            do="launch it with checkpoint.enabled: true",
        )
    state = read_state(file)
    if "trainer" not in state:
        raise _not_recorded(file, state)
    return _located(folder, state)


def remove_older(ctx: RunContext, pattern: str) -> None:
    """Remove all but the newest ``checkpoint.keep_last`` checkpoints that match, on the main rank.

    Args:
        ctx: the run's context.
        pattern: of files or folders below ``ctx.paths.checkpoints``, in the order of their names.
    """
    found = sorted(ctx.paths.checkpoints.glob(pattern)) if ctx.is_main else []
    for old in found[: -ctx.config.checkpoint.keep_last]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


def _located(folder: Path, state: State) -> Path:
    path = Path(os.path.normpath(folder / str(state["trainer"])))
    if path.exists():
        return path
    raise CheckpointError(
        f"the trainer's checkpoint {path} is missing",
        allowed="the checkpoint that the run saved last",
        do='copy it back, or start a new run with resume="never"',
    )


def _not_recorded(file: Path, state: State) -> CheckpointError:
    return CheckpointError(
        f"{file} has no checkpoint of a trainer, only {', '.join(map(str, state)) or 'nothing'}",
        allowed="the file that the callback of nbtoolkit.integrations writes",
        do='save your own state under another name: ctx.save(state, kind="mine")',
    )
