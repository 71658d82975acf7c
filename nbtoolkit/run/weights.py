"""Load weights from a checkpoint without any distributed code."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nbtoolkit.config.yaml_source import read_layer
from nbtoolkit.errors import CheckpointError
from nbtoolkit.run.checkpoint_store import CheckpointStore, Kind, StoredCheckpoint, read_state
from nbtoolkit.run.paths import reading

if TYPE_CHECKING:
    import torch

    Model = TypeVar("Model", bound=torch.nn.Module)


def load_model(path: str | Path, model: Model) -> Model:
    """Load a checkpoint's weights into ``model``, for inference.

    Args:
        path: a run's folder (the weights that its ``checkpoint.weights`` says: the best epoch's,
            else its last ones), one of the checkpoint folders in it, or a file that ``ctx.save``
            wrote.
        model: the architecture that was saved; changed in place.

    Returns:
        ``model``, in evaluation mode, on the device it was on.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it belongs to another model
            (the first differences are named).
    """
    file = find_weights(Path(path))
    if file is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}",
            allowed="a file of ctx.save, or a run's folder with something in checkpoints/",
            do="train with checkpoint.enabled: true, or ctx.save({'model': model.state_dict()})",
        )
    load_weights(read_state(file), model, source=str(file))
    return model.eval()


def load_weights(state: Mapping[str, Any], model: torch.nn.Module, *, source: str) -> None:
    """Load the model's part of a checkpoint's state into ``model``.

    Args:
        state: what was saved: the weights under ``model``, or the weights themselves.
        model: changed in place.
        source: the file's name, for the message.

    Raises:
        CheckpointError: the weights are another model's (the first differences are named).
    """
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
    model.load_state_dict(weights)


def find_weights(path: Path, kind: Literal["best", "last"] | None = None) -> Path | None:
    """The file with a model's weights; None: there is none.

    Args:
        path: a file (returned as it is), a checkpoint folder, or a run's folder.
        kind: which of a run's; None: as its ``checkpoint.weights`` says. Where there is no best
            one, the last is taken.

    Raises:
        CheckpointError: it is damaged, and there is no older one.
        RunFileError: the run's configuration, which says which weights, cannot be read.
    """
    if not path.is_dir():
        return path
    with reading(path):  # another user's
        if (path / "manifest.json").exists():
            return _in_checkpoint(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    store, wished = CheckpointStore(folder), kind or _wished(path)
    order: tuple[tuple[Kind, str], ...] = (("best", "best.pt"), ("step", "last.pt"))
    for one, saved in order[wished == "last" :]:
        entry, wrong = store.good(one)
        for damage in wrong if entry else ():
            warnings.warn(f"passed over a damaged checkpoint, {damage}", stacklevel=2)
        if entry:
            return _weights_in(entry)
        if (folder / saved).exists():
            return folder / saved
    return None


def _wished(folder: Path) -> str:
    """What ``checkpoint.weights`` was in a run's configuration."""
    config = folder / "config.yaml"
    with reading(config):
        settings = read_layer(config).values if config.exists() else {}
        wished: str = settings.get("checkpoint", {}).get("weights", "best")
    return wished


def _in_checkpoint(folder: Path) -> Path:
    """The weights to predict with: averaged ones where the fit kept them."""
    entry = StoredCheckpoint.at(folder)
    if damage := entry.damage():
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {damage}",
            allowed="one that is whole",
            do=f"use another one of {folder.parent}, or put it back from a copy",
        )
    return _weights_in(entry)


def _weights_in(entry: StoredCheckpoint) -> Path:
    parts = [name for name in ("averaged.pt", "model.pt") if name in entry.about["files"]]
    return entry.folder / parts[0]


def _weights(state: Mapping[str, Any], expected: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The model's part of a state, by the model's own names (a wrapper put ``module.`` first)."""
    import torch

    inner = state.get("model")
    weights = inner if isinstance(inner, Mapping) else state
    if not any(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(
            f"the checkpoint {source} holds no model but {', '.join(map(str, state)) or 'nothing'}",
            allowed="what fit saved, or {'model': model.state_dict()}, or a state_dict itself",
            do="save the model with ctx.save({'model': model.state_dict()})",
        )
    wrapped = _all_wrapped(weights) and not _all_wrapped(expected)
    return {name.removeprefix("module.") if wrapped else name: weights[name] for name in weights}


def _all_wrapped(names: Iterable[str]) -> bool:
    return all(name.startswith("module.") for name in names)


def _differences(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    there, here = _shapes(weights), _shapes(expected)
    return [
        *(
            f"{name} is {there[name]} in the file and {here[name]} in the model"
            for name in here
            if name in there and there[name] != here[name]
        ),
        *(f"{name} is missing in the file" for name in here if name not in there),
        *(f"{name} is not in the model" for name in there if name not in here),
    ]


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(value, "shape", ())) for name, value in weights.items()}
