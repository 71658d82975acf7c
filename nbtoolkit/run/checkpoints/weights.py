"""Load a model's weights from a checkpoint, without any distributed code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from nbtoolkit.errors import CheckpointError
from nbtoolkit.run.attempts import readable_first_event
from nbtoolkit.run.checkpoints.checkpoint_store import (
    CheckpointStore,
    Kind,
    StoredCheckpoint,
    read_state,
    without_compile,
)
from nbtoolkit.run.paths import RunPaths, reading

if TYPE_CHECKING:
    import torch

    Model = TypeVar("Model", bound=torch.nn.Module)


class HasWeights(Protocol):
    """A result of a run."""

    def load_into(self, model: Any) -> Any:
        """Load the run's weights."""


def load_model(path: str | os.PathLike[str] | HasWeights, model: Model) -> Model:
    """Load a checkpoint's weights into ``model``, for inference.

    Args:
        path: a run's folder, one of the checkpoint folders in it, a file that ``ctx.save`` wrote,
            or the result of a run. If it is a run, the run's setting ``checkpoint.weights`` says
            which weights are loaded: those of the best epoch, or the last ones.
        model: a model with the same architecture as the saved one; it is changed in place.

    Returns:
        The same ``model``, in evaluation mode, on the same device as before.

    Raises:
        CheckpointError: ``path`` is something else, there is no checkpoint, the checkpoint is
            damaged, or it belongs to another model (the message names the first differences).
    """
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "load_into"):
            raise CheckpointError(
                f"load_model got a {type(path).__name__}, which names no checkpoint",
                allowed="a path, or the result of nb.launch",
                do="pass result.paths.folder, or result.checkpoint",
            )
        path.load_into(model)
        return model
    file = find_weights(Path(path))
    if file is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}",
            allowed="a file of ctx.save, or the folder of a run with checkpoints",
            do="train with checkpoint.enabled: true, or ctx.save({'model': model.state_dict()})",
        )
    load_weights(read_state(file), model, source=str(file))
    return model.eval()


def load_weights(state: Mapping[str, object], model: torch.nn.Module, *, source: str) -> None:
    """Load the model's part of a checkpoint's state into ``model``.

    Args:
        state: the saved state: the weights under ``model``, or the weights themselves.
        model: changed in place.
        source: the file's name, for error messages.

    Raises:
        CheckpointError: the weights belong to another model (names the first differences).
    """
    model.load_state_dict(fitting_weights(state, model, source=source))


def fitting_weights(
    state: Mapping[str, object], model: torch.nn.Module, *, source: str
) -> dict[str, object]:
    """Return the model's part of a checkpoint's state; see :func:`load_weights`."""
    expected = model.state_dict()
    weights = _weights(state, expected, source)
    differences = _differences(weights, expected)
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"the checkpoint {source} does not fit this {type(model).__name__}: "
            f"{'; '.join(differences[:3])}{more}",
            allowed="the model that was saved, with the same layers and sizes",
            do="build the model from the run's own config.yaml, beside its checkpoints folder",
        )
    return weights


def find_weights(path: Path, kind: Literal["best", "last"] | None = None) -> Path | None:
    """Return the file with a model's weights; None: there is none.

    Args:
        path: a file (returned as it is), a checkpoint folder, or a run's folder.
        kind: which weights of a run; None: those that its ``checkpoint.weights`` names. If there
            are no best weights, the last ones are used.

    Raises:
        CheckpointError: all checkpoints are damaged.
        RunFileError: the run's configuration cannot be read.
    """
    if not path.is_dir():
        return path
    with reading(path):  # it may be another user's
        in_checkpoint = (path / "manifest.json").exists()
    if in_checkpoint:
        return _in_checkpoint(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    store = CheckpointStore(folder)
    kind = kind or _configured_kind(path)
    candidates: tuple[tuple[Kind, str], ...] = (("best", "best.pt"), ("step", "last.pt"))
    for stored_kind, saved in candidates[kind == "last" :]:
        entry, damages = store.good(stored_kind)
        if entry:
            for damage in damages:
                warnings.warn(f"skipped a damaged checkpoint, {damage}", stacklevel=2)
            return _weights_in(entry)
        if (folder / saved).exists():
            return folder / saved
    return None


def _configured_kind(folder: Path) -> Literal["best", "last"]:
    """Return the ``checkpoint.weights`` of a run's configuration; the default without a record."""
    first = readable_first_event(RunPaths(folder))
    section = {} if first is None else first.config.get("checkpoint", {})
    return "last" if section.get("weights") == "last" else "best"


def _in_checkpoint(folder: Path) -> Path:
    entry = StoredCheckpoint.at(folder)
    if damage := entry.damage():
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {damage}",
            allowed="an undamaged checkpoint",
            do=f"use another one of {folder.parent}, or restore it from a copy",
        )
    return _weights_in(entry)


def _weights_in(entry: StoredCheckpoint) -> Path:
    """Return the weights to predict with: the averaged ones if the fit saved them."""
    return entry.folder / ("averaged.pt" if "averaged.pt" in entry.files else "model.pt")


def _weights(
    state: Mapping[str, object], expected: Mapping[str, object], source: str
) -> dict[str, object]:
    """Return the model's part of a state, by the model's own names.

    Neither a wrapper's ``module.`` nor torch.compile's ``_orig_mod.`` need be in both.
    """
    import torch

    inner = state.get("model")
    weights = inner if isinstance(inner, Mapping) else state
    if not any(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(
            f"the checkpoint {source} has no model, only {', '.join(map(str, state)) or 'nothing'}",
            allowed="a checkpoint of fit, {'model': model.state_dict()}, or a state_dict itself",
            do="save the model with ctx.save({'model': model.state_dict()})",
        )
    saved = {without_compile(name): value for name, value in weights.items()}
    names = {without_compile(name): name for name in expected}
    if _all_wrapped(saved) and not _all_wrapped(names):
        saved = {name.removeprefix("module."): value for name, value in saved.items()}
    return {names.get(name, name): value for name, value in saved.items()}


def _all_wrapped(names: Iterable[str]) -> bool:
    return all(name.startswith("module.") for name in names)


def _differences(weights: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    saved = _shapes(weights)
    needed = _shapes(expected)
    return [
        *(
            f"{name} is {saved[name]} in the file and {needed[name]} in the model"
            for name in needed
            if name in saved and saved[name] != needed[name]
        ),
        *(f"{name} is missing in the file" for name in needed if name not in saved),
        *(f"{name} is not in the model" for name in saved if name not in needed),
    ]


def _shapes(weights: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(value, "shape", ())) for name, value in weights.items()}
