"""The errors that nbtoolkit raises.

The subclasses stand below their base class::

    NbtoolkitError
    ├── ConfigError            a configuration file or an override is wrong (names file and line)
    │   ├── SpaceError         the configuration of a sweep is wrong: its space or another setting
    │   ├── MetadataError      a kernel-metadata.json is wrong for Kaggle's client
    │   ├── ParameterError     a parameter of a notebook is unknown, missing or of the wrong type
    │   └── PipelineError      the file of a pipeline is wrong: its steps or their references
    ├── PlanError              the configuration is not possible on this machine
    ├── LaunchError            a run or search cannot start, has no result, or lost its supervisor
    │   ├── CannotPickle       an object that the function uses or returns cannot be pickled
    │   ├── NestedLaunch       nb.launch was called inside a rank
    │   ├── DeadlinePassed     the notebook's deadline leaves no time for the call
    │   ├── GroupStartFailed   the ranks cannot form a process group
    │   └── RunFolderError     the run's folder cannot be written (disk full, read-only)
    │       └── RunFileError   a file of a run cannot be read (corrupt, or owned by another user)
    ├── WorkerError            a rank failed, and its exception cannot be raised in the kernel
    │   ├── WorkerDied         a rank ended without an exception (signal, os._exit, sys.exit)
    │   └── WorkerHung         a rank does nothing while another one waits for it or has returned
    ├── ReportError            only some ranks called ctx.report, ctx.raise_if_stopped or ctx.save
    ├── ResumeError            resume= names a run that cannot be resumed
    ├── SweepError             a sweep has failed, or its study cannot be used
    ├── FitError               nb.fit cannot train with the given data, model or settings
    │   └── LossNotFinite      a loss is infinite or NaN (names the step and its samples)
    ├── TuningError            the best value of a setting cannot be measured here
    ├── SubmissionError        a submission does not have the form of the competition's sample
    ├── FoldError              folds cannot be made, a fold failed, or predictions do not match
    ├── CheckpointError        a checkpoint is missing, damaged or of another model
    ├── NotebookError          a notebook cannot run: unreadable, not Python, no such kernel
    ├── NotebookFailed         a notebook did not run to its end (names the cell)
    │   ├── NotebookDied       the kernel of the notebook died, or did not start
    │   ├── NotebookTimeout    the notebook or one of its cells exceeded its time limit
    │   └── PipelineFailed     a notebook that is a step of a pipeline failed (names the step)
    ├── ReportFolderError      nb.report cannot read the folder, or cannot write the page
    ├── PublishError           nb.publish cannot publish a value, or its name is not a string
    ├── BundleError            a bundle cannot be written, read or unpacked
    ├── WheelsError            the wheels for a host cannot be made, or do not fit the host
    ├── TrackingError          the tracking database cannot be used
    └── MissingExtra           an optional package is not installed (gives the install command)

    RunStopped (BaseException)    ends a run on all ranks (a stop, a time limit, a pruned trial)
    FoldWarning (UserWarning)     the scores of folds may be misleading (a missing class)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class NbtoolkitError(Exception):
    """Base of all errors that nbtoolkit raises.

    Args:
        what: what happened.
        allowed: what is allowed instead (optional).
        do: what to do now (optional).
    """

    def __init__(self, what: str, *, allowed: str = "", do: str = "") -> None:
        self.what = what
        self.allowed = allowed
        self.do = do
        lines = [what]
        if allowed:
            lines.append(f"  Allowed: {allowed}")
        if do:
            lines.append(f"  Do now:  {do}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.allowed, self.do, dict(self.__dict__)))

    def _render_traceback_(self) -> list[str]:
        """Format the error for IPython, which calls this: its traceback ends at the user's line."""
        # Imported by name: imports point to this module, and it stays light.
        lines: list[str] = import_module("nbtoolkit.wire.tracebacks").ipython_lines(self)
        return lines


def _rebuild(
    cls: type[NbtoolkitError], what: str, allowed: str, do: str, state: dict[str, object]
) -> NbtoolkitError:
    error = cls.__new__(cls)
    NbtoolkitError.__init__(error, what, allowed=allowed, do=do)
    error.__dict__.update(state)
    return error


def some_names(names: Sequence[str], shown: int = 5) -> str:
    """Return one text with the first few names and the number of the other names."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


class ConfigError(NbtoolkitError):
    """A configuration file, the name of a setting or its value is wrong."""


class SpaceError(ConfigError):
    """The configuration of a sweep is wrong: its space or another setting."""


class MetadataError(ConfigError):
    """A ``kernel-metadata.json`` for Kaggle, or a value to write into it, is wrong."""


class ParameterError(ConfigError):
    """A parameter of a notebook is unknown, missing or of the wrong type."""


class PipelineError(ConfigError):
    """The file of a pipeline is wrong: a step, its parameters or their references."""


class PlanError(NbtoolkitError):
    """The configuration is not possible on this machine."""


class LaunchError(NbtoolkitError):
    """A run or a search cannot start, has no result, or lost its supervisor."""


class CannotPickle(LaunchError):
    """An object that the training function uses or returns cannot be pickled."""


class NestedLaunch(LaunchError):
    """``nb.launch`` was called inside a rank."""


class DeadlinePassed(LaunchError):
    """The notebook's deadline (``nb.set_deadline``) leaves no time for this call."""


class GroupStartFailed(LaunchError):
    """The ranks cannot form a process group."""


class RunFolderError(LaunchError):
    """The folder of a run cannot be written, or it was deleted."""


class RunFileError(RunFolderError, ValueError):
    """A file of a run cannot be read, because it is corrupt or owned by another user."""


class WorkerError(NbtoolkitError):
    """A rank raised an exception that cannot be recreated in this process."""


class WorkerDied(WorkerError):
    """A rank ended without an exception, by a signal, ``os._exit`` or ``sys.exit``."""


class WorkerHung(WorkerError):
    """A rank does nothing while another rank waits for it or has returned."""


class ReportError(NbtoolkitError):
    """Only some ranks made a call that all ranks must make."""


class ResumeError(NbtoolkitError):
    """The argument ``resume`` names a run that cannot be resumed."""


class SweepError(NbtoolkitError):
    """A sweep has failed, or its study cannot be used."""


class FitError(NbtoolkitError):
    """``nb.fit`` cannot train with the given data, model or settings."""


class LossNotFinite(FitError):
    """A loss is infinite or NaN; the message names the step and its samples."""


class TuningError(NbtoolkitError):
    """A setting cannot be measured for this function or on this machine, or was not measured."""


class SubmissionError(NbtoolkitError):
    """A submission does not have the form of the competition's sample."""


class FoldError(NbtoolkitError):
    """Folds cannot be made, a fold has failed, or predictions do not fit the folds."""


class CheckpointError(NbtoolkitError):
    """A checkpoint is missing, damaged or of another model, or it cannot be written."""


class NotebookError(NbtoolkitError):
    """A notebook cannot run, and no kernel was started."""


class NotebookFailed(NbtoolkitError):
    """A notebook did not run to its end.

    Attributes:
        cell: the number of the failed code cell, counted from 1; 0 if no cell failed, for example
            because the kernel did not start.
        output: the path of the executed copy, up to the failure; None if it could not be written.
    """

    cell: int = 0
    output: Path | None = None


class NotebookDied(NotebookFailed):
    """The kernel of a notebook died, or did not start."""


class NotebookTimeout(NotebookFailed):
    """A notebook or one of its cells exceeded its time limit."""


class PipelineFailed(NotebookFailed):
    """A step of a pipeline failed. The results of the completed steps are kept.

    Attributes:
        step: the name of the failed step.
    """

    step: str = ""


class PublishError(NbtoolkitError):
    """``nb.publish`` cannot publish a value, or the name of a value is not a string."""


class ReportFolderError(NbtoolkitError):
    """``nb.report`` cannot read the folder, or cannot write the report."""


class BundleError(NbtoolkitError):
    """A bundle of runs is damaged, unsafe or not a bundle, or it cannot be written or unpacked."""


class WheelsError(NbtoolkitError):
    """The wheels for a host cannot be downloaded or built, or do not fit the host."""


class TrackingError(NbtoolkitError):
    """The tracking database cannot be used."""


class MissingExtra(NbtoolkitError, ImportError):
    """An optional package is not installed; the message gives the install command."""


class RunStopped(BaseException):
    """Raised when a run ends early, so that all ranks leave the training function.

    ``ctx.report`` and ``ctx.watch`` raise it, on all ranks at the same call. Your
    ``except Exception`` does not catch it, because it is a ``BaseException``.

    Args:
        status: the status of the run's result: ``"stopped"``, ``"pruned"`` or ``"deadline"``.
    """

    def __init__(self, status: str = "stopped") -> None:
        self.status = status
        super().__init__(status)


class FoldWarning(UserWarning):
    """A fold lacks a class."""
