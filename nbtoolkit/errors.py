"""Define all errors that nbtoolkit raises; each says what happened, what is allowed, what to do.

NbtoolkitError
├── ConfigError            a configuration file or override is wrong (names file and line)
│   ├── SpaceError         a sweep's configuration is wrong: its space or another setting
│   ├── MetadataError      a kernel-metadata.json is wrong for Kaggle's client
│   ├── ParameterError     a notebook parameter is unknown, missing or of another type
│   └── PipelineError      a pipeline's file is wrong: its steps, or their references
├── PlanError              this machine cannot meet the configuration
├── LaunchError            the launch failed before the user's code ran
│   ├── CannotPickle       a captured object cannot be sent to the ranks (names the global)
│   ├── ForkRefused        start="fork" in a process that is not fork-safe (names the reason)
│   ├── NestedLaunch       nb.launch was called inside a rank
│   ├── DeadlinePassed     the notebook's deadline (nb.set_deadline) leaves no time
│   ├── GroupStartFailed   the ranks could not form a process group (and fallback is off)
│   └── RunFolderError     the run's folder cannot be written (disk full, read-only)
│       └── RunFileError   a run's file cannot be read (corrupt, or another user's)
├── WorkerError            a rank raised an exception that cannot be rebuilt here
│   ├── WorkerDied         a rank ended without an exception (signal, os._exit)
│   └── WorkerHung         a rank is silent and idle while another waits for it or has returned
├── ReportError            not every rank called ctx.report, ctx.raise_if_stopped or ctx.save
├── ResumeError            resume= names a run that does not match
├── SweepError             a sweep cannot start, or cannot resume its study
├── FitError               nb.fit cannot train with its arguments
│   └── LossNotFinite      a loss is infinite or NaN (names the step and its samples)
├── TuningError            a setting cannot be measured for this function or on this machine
├── SubmissionError        a submission does not have the form of the competition's sample
├── FoldError              a data set cannot be split, or folds or predictions do not match
├── CheckpointError        a checkpoint is missing, corrupt or of another model
├── NotebookError          a notebook cannot run: unreadable, not Python, no such kernel
├── NotebookFailed         a notebook did not run to its end (names the cell)
│   ├── NotebookDied       its kernel died (signal, exit code, memory)
│   ├── NotebookTimeout    the notebook or one of its cells exceeded its time limit
│   └── PipelineFailed     the notebook was a step of a pipeline (names the step)
├── ReportFolderError      nb.report cannot read its folder or write its page
├── PublishError           nb.publish accepts plain values only
├── BundleError            packed runs cannot be written, or are corrupt, foreign or unsafe
├── WheelsError            wheels for a host cannot be fetched, or do not fit it
├── TrackingError          the tracking database cannot be used
├── DashboardError         a dashboard cannot be opened here, or has ended
└── MissingExtra           an optional package is not installed (gives the install command)

RunStopped (BaseException)      all ranks leave the user's function at the same report
FoldWarning (UserWarning)  folds may make a score too good, or lack a class
"""

from __future__ import annotations

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
        self.what, self.allowed, self.do = what, allowed, do
        lines = [what]
        if allowed:
            lines.append(f"  Allowed: {allowed}")
        if do:
            lines.append(f"  Do now:  {do}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.allowed, self.do, dict(self.__dict__)))


def _rebuild(
    cls: type[NbtoolkitError], what: str, allowed: str, do: str, state: dict[str, object]
) -> NbtoolkitError:
    error = cls.__new__(cls)
    NbtoolkitError.__init__(error, what, allowed=allowed, do=do)
    error.__dict__.update(state)
    return error


def some_names(names: Sequence[str], shown: int = 5) -> str:
    """The first names for a message, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


class ConfigError(NbtoolkitError):
    """A configuration file, key or value is wrong."""


class SpaceError(ConfigError):
    """A sweep's configuration is wrong: its space or another setting."""


class MetadataError(ConfigError):
    """A notebook's kernel-metadata.json is wrong, or a value to write into it."""


class ParameterError(ConfigError):
    """A notebook parameter is unknown, missing or of another type."""


class PipelineError(ConfigError):
    """A pipeline's file is wrong: a step, its parameters, or their references."""


class PlanError(NbtoolkitError):
    """This machine cannot meet the configuration."""


class LaunchError(NbtoolkitError):
    """The launch failed before the user's code ran."""


class CannotPickle(LaunchError):
    """A captured object cannot be sent to the ranks."""


class ForkRefused(LaunchError):
    """``start="fork"`` was requested in a process that is not fork-safe."""


class NestedLaunch(LaunchError):
    """``nb.launch`` was called inside a rank."""


class DeadlinePassed(LaunchError):
    """The notebook's deadline (``nb.set_deadline``) leaves no time for this call."""


class GroupStartFailed(LaunchError):
    """The ranks could not form a process group."""


class RunFolderError(LaunchError):
    """The run's folder cannot be written."""


class RunFileError(RunFolderError, ValueError):
    """A run's file cannot be read: it is corrupt, or another user's."""


class WorkerError(NbtoolkitError):
    """A rank raised an exception that cannot be rebuilt in this process."""


class WorkerDied(WorkerError):
    """A rank ended without an exception: a signal, or ``os._exit``."""


class WorkerHung(WorkerError):
    """A rank is silent and idle while another rank waits for it or has returned."""


class ReportError(NbtoolkitError):
    """Not every rank made a call that all ranks must make."""


class ResumeError(NbtoolkitError):
    """``resume=`` names a run that cannot be resumed."""


class SweepError(NbtoolkitError):
    """A sweep cannot start, or cannot resume its study."""


class FitError(NbtoolkitError):
    """``nb.fit`` cannot train with the given data, model or settings."""


class LossNotFinite(FitError):
    """A loss is infinite or NaN; the message names the step and its samples."""


class TuningError(NbtoolkitError):
    """A setting cannot be measured for this function or on this machine."""


class SubmissionError(NbtoolkitError):
    """A submission does not have the form of the competition's sample."""


class FoldError(NbtoolkitError):
    """A data set cannot be split as requested, or folds do not match their data."""


class CheckpointError(NbtoolkitError):
    """A checkpoint is missing, corrupt or of another model."""


class NotebookError(NbtoolkitError):
    """A notebook cannot run; no kernel was started."""


class NotebookFailed(NbtoolkitError):
    """A notebook did not run to its end.

    Attributes:
        cell: number of the failed code cell, from 1; 0 if no cell failed (the kernel did not
            start, or the executed copy could not be written).
        output: the executed copy up to the failure; None if it could not be written.
    """

    cell: int = 0
    output: Path | None = None


class NotebookDied(NotebookFailed):
    """A notebook's kernel died, or did not start."""


class NotebookTimeout(NotebookFailed):
    """A notebook or one of its cells exceeded its time limit."""


class PipelineFailed(NotebookFailed):
    """A step of a pipeline failed; the results of completed steps are kept.

    Attributes:
        step: the failed step's name.
    """

    step: str = ""


class PublishError(NbtoolkitError):
    """``nb.publish`` accepts plain values only."""


class ReportFolderError(NbtoolkitError):
    """The folder to report on does not exist, or the report cannot be written."""


class BundleError(NbtoolkitError):
    """A bundle of runs cannot be written, does not fit, or is corrupt, foreign or unsafe."""


class WheelsError(NbtoolkitError):
    """Wheels for a host cannot be fetched or built, or do not fit the host."""


class TrackingError(NbtoolkitError):
    """The tracking database cannot be used."""


class DashboardError(NbtoolkitError):
    """A dashboard cannot be opened here, or has ended (the message shows its output)."""


class MissingExtra(NbtoolkitError, ImportError):
    """An optional package is not installed; the message gives the install command."""


class RunStopped(BaseException):
    """Raised on all ranks at one ``ctx.report`` or ``ctx.raise_if_stopped`` when a run ends early.

    It is a ``BaseException``, so ``except Exception`` in user code does not swallow it.

    Args:
        status: the status that the launch returns: ``"stopped"``, ``"pruned"`` or ``"deadline"``.
    """

    def __init__(self, status: str = "stopped") -> None:
        self.status = status
        super().__init__(status)


class FoldWarning(UserWarning):
    """Validation data also occurs in the training data, or a fold lacks a class."""
