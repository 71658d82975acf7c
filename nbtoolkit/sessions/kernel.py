"""Write a notebook and its kernel-metadata.json into a folder for Kaggle's client."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.errors import MetadataError
from nbtoolkit.notebooks.document import (
    declared_parameters,
    read_notebook,
    refuse_syntax_errors,
    with_parameters,
)
from nbtoolkit.notebooks.parameters import check_parameters, given_layer
from nbtoolkit.run.paths import write_json, write_whole

FILE = "kernel-metadata.json"

# https://github.com/Kaggle/kaggle-cli/blob/main/docs/kernels_metadata.md
TEMPLATE: Mapping[str, object] = {
    "language": "python",
    "kernel_type": "notebook",
    "is_private": True,
    "enable_gpu": False,
    "enable_tpu": False,
    "enable_internet": False,
    "dataset_sources": [],
    "competition_sources": [],
    "kernel_sources": [],
    "model_sources": [],
}

GPUS: Mapping[str, str] = {
    "t4": "NvidiaTeslaT4",
    "p100": "NvidiaTeslaP100",
    "l4": "NvidiaL4",
    "a100": "NvidiaA100",
    "h100": "NvidiaH100",
    "rtx6000": "NvidiaRtxPro6000",
}
"""Short name -> ``machine_shape``, as of 2026-02 (https://github.com/Kaggle/kaggle-cli/pull/916).

Without a shape, Kaggle gives a P100, on which the image's torch does not run (sm_60).
"""


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """Settings of a notebook on Kaggle; None: as in the existing metadata, else the default."""

    user: str | None = None
    """Your name on Kaggle; default: ``KAGGLE_USERNAME``."""
    title: str | None = None
    """Five characters or more; default: the file's name."""
    gpu: str | None = None
    """``"t4"`` (two of them), ``"l4"``, ``"p100"`` ..., or ``"none"``, the default."""
    internet: bool | None = None
    """Whether the notebook can use the internet; default: no."""
    private: bool | None = None
    """Whether only you can see the notebook; default: yes."""
    datasets: Sequence[str] = ()
    """Data sets to attach, in addition to those of the existing metadata: ``user/slug``."""
    competitions: Sequence[str] = ()
    """Competitions whose data to attach, likewise: their slugs."""
    kernels: Sequence[str] = ()
    """Notebooks whose output to attach, likewise: ``user/slug``."""


def slug_of(title: str) -> str:
    """Return a title as in Kaggle's addresses: ``train-once`` for ``Train, once``."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def write_kernel(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    settings: KernelSettings | None = None,
    parameters: Mapping[str, object] | None = None,
) -> Path:
    """Write a folder for ``kaggle kernels push -p FOLDER``.

    An existing kernel-metadata.json in the folder keeps its values, except for these settings.
    Kaggle's client checks the values.

    Args:
        path: the notebook; its copy has no outputs.
        output: the folder; default: ``outputs/kaggle/<slug>``.
        settings: settings of the notebook on Kaggle.
        parameters: values for the notebook's parameters, checked as for a run.

    Returns:
        The folder.

    Raises:
        MetadataError: there is no owner or no such GPU, or the existing file is not JSON.
        NotebookError: the notebook is unreadable or not Python.
        ParameterError: a parameter is unknown, missing or of another type.
    """
    import nbformat

    settings = settings or KernelSettings()
    source = Path(path).expanduser()
    notebook = read_notebook(source)
    refuse_syntax_errors(notebook, source.name)
    declared = declared_parameters(notebook, source.name)
    values = check_parameters(given_layer(parameters, None), declared, source.name)
    slug = slug_of(settings.title or source.stem)
    folder = Path(output or Path("outputs/kaggle") / slug).expanduser()
    metadata = _metadata(_existing(folder / FILE), source, settings)
    folder.mkdir(parents=True, exist_ok=True)
    copy = with_parameters(notebook, values)
    write_whole(folder / source.name, f"{nbformat.writes(copy, version=4)}\n")
    write_json(folder / FILE, metadata)
    return folder


def _metadata(
    existing: Mapping[str, object], source: Path, settings: KernelSettings
) -> dict[str, object]:
    """Fill the template with what the folder has already, and with the settings."""
    title = str(settings.title or existing.get("title") or source.stem.replace("_", " "))
    metadata = {**TEMPLATE, **existing, "title": title, "code_file": source.name}
    # Kaggle uses the title where the two differ.
    metadata["id"] = f"{_owner(settings.user, existing)}/{slug_of(title)}"
    if settings.gpu is not None:
        shape = _shape(settings.gpu)
        metadata |= {"enable_gpu": bool(shape), "machine_shape": shape}
    if settings.private is not None:
        metadata["is_private"] = settings.private
    if settings.internet is not None:
        metadata["enable_internet"] = settings.internet
    sources = {
        "dataset_sources": settings.datasets,
        "competition_sources": settings.competitions,
        "kernel_sources": settings.kernels,
    }
    for key, more in sources.items():
        present = metadata[key]
        known = present if isinstance(present, list) else []
        metadata[key] = list(dict.fromkeys([*known, *more]))
    return metadata


def _existing(file: Path) -> dict[str, object]:
    """Return the metadata in a file, which may be edited by hand; {} if there is none.

    Raises:
        MetadataError: it is not a JSON object.
    """
    try:
        values: object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise MetadataError(
            f"{file} is not JSON: {error}", do="correct it, or delete it"
        ) from error
    if not isinstance(values, dict):
        raise MetadataError(f"{file} is not a JSON object", do="correct or delete it")
    return values


def _owner(user: str | None, existing: Mapping[str, object]) -> str:
    """Return the notebook's owner.

    Raises:
        MetadataError: no owner is given: the client would send an id without one.
    """
    owner, slash, _ = str(existing.get("id", "")).partition("/")
    name = user or (owner if slash else "") or os.environ.get("KAGGLE_USERNAME")
    if not name:
        raise MetadataError(
            "the notebook has no owner: its id names no user",
            allowed="your name on Kaggle, as in the address of your profile",
            do="give it: --user NAME, or the variable KAGGLE_USERNAME",
        )
    return name


def _shape(gpu: str) -> str:
    """Return Kaggle's name of a machine; empty: one without a GPU.

    Raises:
        MetadataError: Kaggle has no such GPU.
    """
    if gpu == "none":
        return ""
    if gpu.lower() not in GPUS:
        raise MetadataError(
            f"Kaggle has no GPU {gpu!r}",
            allowed=", ".join([*GPUS, "none"]),
            do="t4 stands for two of them",
        )
    return GPUS[gpu.lower()]
