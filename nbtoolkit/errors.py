"""Every error raised on purpose, in one tree; each says what happened, is allowed, to do now.

NbtoolkitError
├── ConfigError            a configuration file or override is wrong (names file and line)
│   ├── SpaceError         a sweep's file is wrong: its space, or what is wished of it
│   ├── MetadataError      a kernel-metadata.json would mislead Kaggle's client
│   ├── ParameterError     a notebook has no such parameter, or not of this type
│   └── PipelineError      a pipeline's file is wrong: its steps, or what they refer to
├── PlanError              the wish cannot be planned on this machine
├── LaunchError            the launch failed before the user's code ran
│   ├── CannotPickle       a captured object cannot travel to the ranks (names the global)
│   ├── ForkRefused        start="fork" where a fork would hang (names the reason)
│   ├── NestedLaunch       nb.launch called inside a rank
│   ├── GroupStartFailed   the ranks could not form a process group (and fallback is off)
│   └── RunFolderError     the run's folder cannot be written (disk full, read-only)
│       └── RunFileError   a file of a run cannot be read (damaged, or another user's)
├── WorkerError            a rank failed with an exception that cannot be rebuilt here
│   ├── WorkerDied         a rank ended without an exception (signal, os._exit)
│   └── WorkerHung         a rank is silent and idle while another waits for it
├── ReportError            ctx.report, ctx.raise_if_stopped or ctx.save was not called by every rank
├── ResumeError            resume= names a run that does not fit
├── SweepError             a sweep cannot begin, or cannot go on with its study
├── FitError               nb.fit was given something it cannot train with
├── FoldError              a data set cannot be split so, or folds or their predictions do not fit
├── CheckpointError        a checkpoint is missing, damaged or foreign
├── NotebookError          a notebook cannot be run: unreadable, not Python, no such kernel
├── NotebookFailed         a notebook did not come to its end (names the cell)
│   ├── NotebookDied       its kernel died (signal, exit code, memory)
│   ├── NotebookTimeout    it, or one of its cells, took longer than it may
│   └── PipelineFailed     it was a step of a pipeline (names the step, and how to go on)
├── ReportFolderError      nb.report has no folder to read, or nowhere to write
├── PublishError           nb.publish was given what is no plain value
├── BundleError            packed runs cannot be written, or are damaged, foreign or unsafe
├── WheelsError            wheels for a host cannot be had, or do not do there
├── TrackingError          the tracking database cannot be used
├── DashboardError         a dashboard cannot be opened here, or has ended
└── MissingExtra           an optional package is not installed (gives the install line)

RunStopped (BaseException)      all ranks leave the user's function at the same report
FoldWarning (UserWarning)  folds may make a score too good, or lack a class
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NbtoolkitError(Exception):
    """Base of every error raised on purpose.

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


class ConfigError(NbtoolkitError):
    """A configuration file, key or value is wrong."""


class SpaceError(ConfigError):
    """A sweep's file or dict is wrong: its space, or what is wished of it."""


class MetadataError(ConfigError):
    """A notebook's kernel-metadata.json is wrong, or what is to be written into it."""


class ParameterError(ConfigError):
    """A notebook's parameter is unknown, of another type, or missing."""


class PipelineError(ConfigError):
    """A pipeline's file is wrong: a step, its parameters, or what they refer to."""


class PlanError(NbtoolkitError):
    """The wish cannot be planned on this machine."""


class LaunchError(NbtoolkitError):
    """The launch failed before the user's code ran."""


class CannotPickle(LaunchError):
    """A captured object cannot travel to the ranks."""


class ForkRefused(LaunchError):
    """``start="fork"`` was asked for in a process that is not fork-safe."""


class NestedLaunch(LaunchError):
    """``nb.launch`` was called inside a rank."""


class GroupStartFailed(LaunchError):
    """The ranks could not form a process group."""


class RunFolderError(LaunchError):
    """The run's folder cannot be written."""


class RunFileError(RunFolderError, ValueError):
    """A file of a run cannot be read: it is damaged, or another user's."""


class WorkerError(NbtoolkitError):
    """A rank failed with an exception that cannot be rebuilt in this process."""


class WorkerDied(WorkerError):
    """A rank ended without an exception: a signal, or ``os._exit``."""


class WorkerHung(WorkerError):
    """A rank is silent and idle while another rank waits for it."""


class ReportError(NbtoolkitError):
    """A call that every rank must make was not made by every rank."""


class ResumeError(NbtoolkitError):
    """``resume=`` names a run that cannot be gone on with."""


class SweepError(NbtoolkitError):
    """A sweep cannot begin, or cannot go on with its study."""


class FitError(NbtoolkitError):
    """``nb.fit`` was given data, a model or a setting that it cannot train with."""


class LossNotFinite(FitError):
    """A loss is infinite or no number; the step and its samples are named."""


class FoldError(NbtoolkitError):
    """A data set cannot be split as asked, or folds and what they are used with do not fit."""


class CheckpointError(NbtoolkitError):
    """A checkpoint is missing, damaged or belongs to something else."""


class NotebookError(NbtoolkitError):
    """A notebook cannot be run; no kernel was started."""


class NotebookFailed(NbtoolkitError):
    """A notebook did not come to its end.

    Attributes:
        cell: the number of the code cell that failed, from 1; 0: none did (its kernel did not
            start, or its copy could not be written).
        output: the executed copy, as far as it came; None: it could not be written.
    """

    cell: int = 0
    output: Path | None = None


class NotebookDied(NotebookFailed):
    """A notebook's kernel died, or did not start."""


class NotebookTimeout(NotebookFailed):
    """A notebook, or one of its cells, took longer than it may."""


class PipelineFailed(NotebookFailed):
    """A step of a pipeline did not come to its end; those done before it are kept.

    Attributes:
        step: its name.
    """

    step: str = ""


class PublishError(NbtoolkitError):
    """``nb.publish`` was given something that is no plain value."""


class ReportFolderError(NbtoolkitError):
    """There is no folder to report on, or the report cannot be written."""


class BundleError(NbtoolkitError):
    """A bundle of runs cannot be written, does not fit, or is damaged, foreign or unsafe."""


class WheelsError(NbtoolkitError):
    """Wheels for a host cannot be fetched or made, or would not do there."""


class TrackingError(NbtoolkitError):
    """The tracking database cannot be used."""


class DashboardError(NbtoolkitError):
    """A dashboard cannot be opened here, or has ended (shows what it wrote)."""


class MissingExtra(NbtoolkitError, ImportError):
    """An optional package is not installed; the message carries the install line."""


class RunStopped(BaseException):
    """Raised on all ranks at one ``ctx.report`` or ``ctx.raise_if_stopped`` when a run ends early.

    A ``BaseException``, so that ``except Exception`` in user code does not swallow it.
    ``status`` is the status the launch returns: ``"stopped"``, ``"pruned"`` or ``"deadline"``.
    """

    def __init__(self, status: str = "stopped") -> None:
        self.status = status
        super().__init__(status)


class FoldWarning(UserWarning):
    """What is seen in validation was seen in training too, or a fold lacks a class."""
