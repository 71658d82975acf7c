"""Choose the trackers of a run from its configuration and from what is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

INSTALL = {
    "mlflow": "pip install mlflow",
    "tensorboard": "pip install tensorboard",
}
"""The install line of each tracker, by package."""

# mlflow-skinny comes without these two, and then fails with a message that names neither.
_FOR_SQLITE = ("sqlalchemy", "alembic")


@dataclass(frozen=True, kw_only=True)
class TrackingChoice:
    """What will be written; the notes warn the user of what was asked for and is missing."""

    mlflow: bool
    tensorboard: bool
    notes: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        """Whether anything is to be written at all."""
        return self.mlflow or self.tensorboard


def _installed(module: str) -> bool:
    spec = find_spec(module)  # looks for the files; imports nothing
    return spec is not None and spec.has_location  # a mere folder of that name has no location


def choose_tracking(
    settings: Mapping[str, Any], installed: Callable[[str], bool] = _installed
) -> TrackingChoice:
    """Choose the trackers of a run.

    What is not installed is left out with a note, not with an error: MLflow is on by default, and
    Kaggle's image does not have it.

    Args:
        settings: the configuration's ``tracking`` section (``mlflow``, ``tensorboard``, ``uri``).
        installed: whether a module can be imported.
    """
    wanted = [name for name in INSTALL if settings.get(name, name == "mlflow")]
    missing = {name: _missing(_needs(name, settings), installed) for name in wanted}
    return TrackingChoice(
        mlflow="mlflow" in wanted and not missing["mlflow"],
        tensorboard="tensorboard" in wanted and not missing["tensorboard"],
        notes=tuple(_note(name, modules) for name, modules in missing.items() if modules),
    )


def _needs(name: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    uri = settings.get("uri") or "sqlite:"
    sqlite = name == "mlflow" and str(uri).startswith("sqlite:")
    return (name, *_FOR_SQLITE) if sqlite else (name,)


def _missing(modules: tuple[str, ...], installed: Callable[[str], bool]) -> list[str]:
    return [module for module in modules if not installed(module)]


def _note(name: str, modules: list[str]) -> str:
    return (
        f"tracking.{name} is on, but {' and '.join(modules)} cannot be imported: this run is not "
        f"tracked there. To have it: {INSTALL[name]} (or set tracking.{name}: false). The run's "
        "folder has all its metrics; nbtoolkit.tracking.replay(folder) writes them later."
    )
