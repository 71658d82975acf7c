"""``nbtoolkit kaggle-kernel``: a notebook and its metadata, in a folder for Kaggle's client."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import MetadataError
from nbtoolkit.hosts.kernel_metadata import FILE, GPUS, check_metadata, read_metadata, slug_of
from nbtoolkit.notebooks.document import (
    declared_parameters,
    read_notebook,
    refuse_syntax_errors,
    with_parameters,
)
from nbtoolkit.notebooks.parameters import check_parameters, given_layer
from nbtoolkit.runtime.paths import write_json, write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode


def write_kernel(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    user: str | None = None,
    title: str | None = None,
    gpu: str | None = None,
    internet: bool | None = None,
    private: bool | None = None,
    datasets: Sequence[str] = (),
    competitions: Sequence[str] = (),
    kernels: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder that ``kaggle kernels push -p FOLDER`` sends as it is.

    What a kernel-metadata.json that is there already says stays, but for what is given here.

    Args:
        path: the notebook; its copy has no outputs.
        output: the folder; default: ``outputs/kaggle/<slug>``.
        user: your name on Kaggle; default: that of the metadata there, else ``KAGGLE_USERNAME``.
        title: five characters or more; default: that of the metadata there, else the file's name.
        gpu: ``"t4"`` (two of them), ``"l4"``, ``"p100"`` ..., ``"none"``; default: as the metadata
            there says, else none.
        internet: whether the notebook may use it; default: as the metadata there says, else no.
        private: whether you alone can see it; default: as the metadata there says, else yes.
        datasets: data sets to attach, as ``user/slug``; to those of the metadata there.
        competitions: competitions whose data to attach, by slug; likewise.
        kernels: notebooks whose output to attach, as ``user/slug``; likewise.
        parameters: values for the notebook's parameters, checked as for a run of it.

    Returns:
        The folder.

    Raises:
        MetadataError: Kaggle would not take the metadata, or take it for something else.
        NotebookError: the notebook cannot be read, or is not Python.
        ParameterError: a parameter is unknown, of another type or missing.
    """
    source = Path(path).expanduser()
    notebook = _with(parameters, read_notebook(source), source.name)
    folder = Path(output or Path("outputs/kaggle") / slug_of(title or source.stem)).expanduser()
    there = read_metadata(folder / FILE)
    name = title or there.get("title") or source.stem.replace("_", " ")
    metadata = {
        "is_private": True,
        "enable_gpu": False,
        "enable_tpu": False,
        "enable_internet": False,
        **there,
        "id": _id(user, name, there),
        "title": name,
        "code_file": source.name,
        "language": "python",
        "kernel_type": "notebook",
        **_machine(gpu),
        **_given(is_private=private, enable_internet=internet),
        "dataset_sources": _joined(there, "dataset_sources", datasets),
        "competition_sources": _joined(there, "competition_sources", competitions),
        "kernel_sources": _joined(there, "kernel_sources", kernels),
    }
    check_metadata(metadata)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / source.name, _text(notebook))
    write_json(folder / FILE, metadata)
    return folder


def _with(parameters: Mapping[str, Any] | None, notebook: NotebookNode, name: str) -> NotebookNode:
    refuse_syntax_errors(notebook, name)
    declared = declared_parameters(notebook, name)
    return with_parameters(
        notebook, check_parameters(given_layer(parameters, None), declared, name)
    )


def _id(user: str | None, title: str, there: Mapping[str, Any]) -> str:
    """Owner and slug.

    Raises:
        MetadataError: nobody says whose notebook it is.
    """
    owner = user or str(there.get("id", "")).partition("/")[0] or os.environ.get("KAGGLE_USERNAME")
    if not owner:
        raise MetadataError(
            "nobody says whose notebook this is: its id has no owner",
            allowed="your name on Kaggle, as in the address of your profile",
            do='give it: --user NAME, user="NAME", or the variable KAGGLE_USERNAME',
        )
    return f"{owner}/{slug_of(title)}"


def _machine(gpu: str | None) -> dict[str, Any]:
    """The keys that choose a machine; none where nothing is wished.

    Raises:
        MetadataError: Kaggle has no such GPU.
    """
    if gpu is None:
        return {}
    if gpu == "none":
        return {"enable_gpu": False, "machine_shape": ""}
    if gpu.lower() not in GPUS:
        raise MetadataError(
            f"Kaggle has no GPU {gpu!r}",
            allowed=", ".join([*GPUS, "none"]),
            do="t4 stands for two of them",
        )
    return {"enable_gpu": True, "machine_shape": GPUS[gpu.lower()]}


def _given(**wishes: bool | None) -> dict[str, bool]:
    return {key: wish for key, wish in wishes.items() if wish is not None}


def _joined(there: Mapping[str, Any], key: str, more: Sequence[str]) -> list[str]:
    """What is attached already and what comes to it, each once."""
    return list(dict.fromkeys([*there.get(key, ()), *more]))


def _text(notebook: NotebookNode) -> str:
    import nbformat

    return f"{nbformat.writes(notebook, version=4)}\n"
