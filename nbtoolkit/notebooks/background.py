"""Run a notebook in a background process, which outlives the process that starts it.

The process reads the checked job from stdin. Its stdout is the log, so that it holds the lock on
the run's files until it ends. The panel starts the notebooks that ship with nbtoolkit this way;
their executed copies go to the folder ``notebooks`` beside the runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nbtoolkit.config.layers import shipped_folder
from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.config.yaml_source import dump
from nbtoolkit.errors import NotebookError, NotebookFailed
from nbtoolkit.notebooks.execution import Limits
from nbtoolkit.notebooks.handle import NotebookHandle, fresh_name, not_written
from nbtoolkit.notebooks.job import NotebookJob, prepare_job, skip_slow_imports
from nbtoolkit.notebooks.parameters import given_layer
from nbtoolkit.run.paths import write_json, write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode

# The working directory is not on the path: a file named random.py there belongs to the kernel. An
# interrupt during the imports ends the process at once: Python would raise KeyboardInterrupt in the
# middle of an import, some of whose callbacks lose it.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.notebooks.background import main; main()"
)

# Processes that this process has started and must reap.
_processes: list[subprocess.Popen[bytes]] = []


def start_notebook(
    job: NotebookJob,
    notebook: NotebookNode,
    log: TextIO,
    limits: Limits,
    environ: Mapping[str, str],
) -> NotebookHandle:
    """Start a notebook in the background.

    Args:
        job: the checked job.
        notebook: its source, read and checked.
        log: from :meth:`NotebookFiles.open`; the new process inherits its lock.
        limits: limits of time and output.
        environ: all environment variables of the kernel.

    Raises:
        NotebookError: the disk is full.
        OSError: the process could not be started.
    """
    _processes[:] = [process for process in _processes if process.poll() is None]
    home = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT.format(home=home), str(job.files.copy)],  # the copy is for ps
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        # Neither Jupyter's interrupt nor a terminal's hangup reaches the process.
        start_new_session=True,
        cwd="/",
        # ipykernel 6.17 (Kaggle's) prints lines about its debugger from Python 3.11 on.
        env={"PYDEVD_DISABLE_FILE_VALIDATION": "1", **environ},
    )
    _processes.append(process)
    assert process.stdin is not None
    try:
        # A broken pipe: the process has ended already, and its log says why.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            # NotebookHandle.stop reads the pid; the process replaces this record when it ends.
            write_json(job.files.record, {"status": "running", "pid": process.pid}, durable=False)
            pickle.dump((job, notebook, limits), pipe)
    except OSError as error:
        raise not_written(job.files.copy, error, NotebookError) from error
    return NotebookHandle(job.files.copy, process)


def main() -> None:
    """Run the job that arrives on stdin."""
    skip_slow_imports()
    import nbtoolkit.notebooks.engine  # noqa: F401  # loads papermill before signals are handled

    job, notebook, limits = pickle.load(sys.stdin.buffer)
    # The record says how the run ended.
    recorded = contextlib.suppress(NotebookFailed, KeyboardInterrupt)
    with open(os.dup(1), "a", encoding="utf-8") as log, recorded:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have set them to be ignored
            signal.signal(number, signal.default_int_handler)
        job.run(notebook, log, limits, "off")


def start_training(config: Config, *, name: str) -> NotebookHandle:
    """Train once, with ``01_train.ipynb``.

    Args:
        config: the configuration; its ``task`` is trained.
        name: part of the run's id.

    Raises:
        NotebookError: the notebook cannot be run, or the output folder cannot be written.
        MissingExtra: papermill is not installed.
    """
    given = {"name": name, "own_function": False}
    return _start_shipped("01_train", _copy(config, "01_train"), config, given)


def start_search(
    config: Config, space: Mapping[str, object], *, n_trials: int | None = None
) -> NotebookHandle:
    """Search for the best settings, with ``02_sweep.ipynb``.

    Args:
        config: the configuration; its ``task`` is trained.
        space: the sweep's file as a mapping; it is written beside the executed copy.
        n_trials: total number of trials; None: as ``space`` says.

    Raises:
        NotebookError: the notebook cannot be run, or the output folder cannot be written.
        MissingExtra: papermill is not installed.
    """
    copy = _copy(config, "02_sweep")
    space_file = copy.with_suffix(".space.yaml")
    try:
        write_whole(space_file, dump(space))
    except OSError as error:
        raise not_written(copy, error, NotebookError) from error
    given = {"space_path": str(space_file), "n_trials": n_trials or 0, "train_winner": False}
    return _start_shipped("02_sweep", copy, config, given)


def _start_shipped(
    name: str, copy: Path, config: Config, given: Mapping[str, object]
) -> NotebookHandle:
    path = shipped_folder("notebooks") / f"{name}.ipynb"
    parameters = {
        "config_path": "",
        "overrides": overrides_of(config),
        "output_dir": config.runtime.output_dir,
        **given,
    }
    job, notebook = prepare_job(path, copy, given_layer(parameters, None), html=False)
    with contextlib.closing(job.files.open()) as log:
        return start_notebook(job, notebook, log, Limits(), _environ())


def overrides_of(config: Config) -> dict[str, object]:
    """Return the settings that differ from this host's defaults, by dotted name.

    Without ``runtime.output_dir``, which is a parameter of its own.
    """
    overrides = dict(_differences(config.to_dict(), load_config().to_dict()))
    overrides.pop("runtime.output_dir", None)
    return overrides


def _differences(
    values: Mapping[str, object], defaults: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from _differences(value, default, f"{prefix}{key}.")
        elif key not in defaults or value != default:
            yield f"{prefix}{key}", value


def _copy(config: Config, name: str) -> Path:
    folder = Path(config.runtime.output_dir).expanduser().absolute() / "notebooks"
    return folder / fresh_name(name)


def _environ() -> dict[str, str]:
    """Return this process's variables, with the user's own import folders in PYTHONPATH.

    Python's own folders are left out: the kernel has its own, and may be another Python.
    """
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    own = [path for path in sys.path if "site-packages" not in path]
    own = [path for path in own if not path.startswith(prefixes)]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys(path for path in (*own, *before) if path)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
