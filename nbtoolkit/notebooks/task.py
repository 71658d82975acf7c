"""Train or search the function that a configuration names, for notebooks that ship.

The configuration's settings are the notebook's parameters; it runs in the background, and its
executed copy goes to the folder ``notebooks`` beside the runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbtoolkit.config.layers import shipped_folder
from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.config.yaml_source import dump
from nbtoolkit.errors import NotebookError
from nbtoolkit.notebooks.engine import Limits
from nbtoolkit.notebooks.handle import NotebookHandle, fresh_name, not_written
from nbtoolkit.notebooks.parameters import given_layer
from nbtoolkit.notebooks.run import MAX_OUTPUT, checked, start
from nbtoolkit.run.paths import write_whole


def start_training(config: Config, *, name: str) -> NotebookHandle:
    """Train once, by ``01_train.ipynb``.

    Args:
        config: whose ``task`` is trained.
        name: a part of the run's id.

    Raises:
        NotebookError: the notebook cannot be run; the output folder cannot be written.
        MissingExtra: papermill is not installed.
    """
    copy = _copy(config, "01_train")
    return _start(copy, "01_train", config, {"name": name, "own_function": False})


def start_search(
    config: Config, space: Mapping[str, Any], *, n_trials: int | None = None
) -> NotebookHandle:
    """Search for the best settings, by ``02_sweep.ipynb``.

    Args:
        config: whose ``task`` is trained.
        space: what is searched, and how; it is written beside the executed copy.
        n_trials: trials in all; None: as the space says.

    Raises:
        NotebookError: the notebook cannot be run; the output folder cannot be written.
        MissingExtra: papermill is not installed.
    """
    copy = _copy(config, "02_sweep")
    file = copy.with_suffix(".space.yaml")
    try:
        write_whole(file, dump(space))
    except OSError as error:
        raise not_written(copy, error, NotebookError) from error
    given = {"space_path": str(file), "n_trials": n_trials or 0, "train_winner": False}
    return _start(copy, "02_sweep", config, given)


def _start(copy: Path, name: str, config: Config, given: Mapping[str, Any]) -> NotebookHandle:
    path = shipped_folder("notebooks") / f"{name}.ipynb"
    parameters = {
        "config_path": "",
        "overrides": overrides_of(config),
        "output_dir": config.runtime.output_dir,
        **given,
    }
    job, notebook = checked(path, copy, given_layer(parameters, None), html=False)
    with contextlib.closing(job.files.open()) as log:
        return start(job, notebook, log, Limits(max_output=MAX_OUTPUT), _environ())


def overrides_of(config: Config) -> dict[str, Any]:
    """What makes a configuration out of that of this host: by dotted name, without the folder."""
    found = dict(_differing(config.to_dict(), load_config().to_dict()))
    found.pop("runtime.output_dir", None)  # a parameter of its own
    return found


def _differing(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in mine.items():
        other = theirs.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differing(value, other, f"{prefix}{key}.")
        elif key not in theirs or value != other:
            yield f"{prefix}{key}", value


def _copy(config: Config, name: str) -> Path:
    folder = Path(config.runtime.output_dir).expanduser().absolute() / "notebooks"
    return folder / fresh_name(name)


def _environ() -> dict[str, str]:
    """This process's variables; what it can import from the user's own folders the kernel can, too.

    What lies in Python's folders the kernel has by itself, and it may be another Python.
    """
    homes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    own = [
        path
        for path in sys.path
        if path and "site-packages" not in path and not path.startswith(tuple(homes))
    ]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys(path for path in (*own, *before) if path)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
