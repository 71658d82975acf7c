"""Write a notebook and its checked metadata into a folder for Kaggle's client."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.yaml_source import Layer, Mistake, read_layer, refuse
from nbtoolkit.errors import MetadataError
from nbtoolkit.notebooks.document import (
    declared_parameters,
    read_notebook,
    refuse_syntax_errors,
    with_parameters,
)
from nbtoolkit.notebooks.parameters import check_parameters, given_layer
from nbtoolkit.run.paths import write_json, write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode


# --- kernel metadata ---
# Kernel-metadata.json: what Kaggle's client is told of a notebook, checked before it is sent.
#
# The keys are those of https://github.com/Kaggle/kaggle-cli/blob/main/docs/kernels_metadata.md and
# of ``kaggle kernels init`` (kaggle 2.2.4). The client passes unknown keys over in silence, and an
# id without an owner it sends.


FILE = "kernel-metadata.json"

GPUS: Mapping[str, str] = {
    "t4": "NvidiaTeslaT4",
    "p100": "NvidiaTeslaP100",
    "l4": "NvidiaL4",
    "a100": "NvidiaTeslaA100",
    "h100": "NvidiaH100",
    "rtx6000": "NvidiaRtxPro6000",
}
"""Short name -> ``machine_shape``, as of 2026-02 (https://github.com/Kaggle/kaggle-cli/pull/916).

Who asks for a GPU without a shape gets a P100, on which the image's torch does not run (sm_60).
"""

_SLUG = r"[a-z0-9]+(-[a-z0-9]+)*"
_OWNED = re.compile(rf"[\w-]+/{_SLUG}", re.IGNORECASE)
_VERSIONED = re.compile(rf"[\w-]+/{_SLUG}(/\d+)?", re.IGNORECASE)
_MODEL = re.compile(r"[\w.-]+(/[\w.-]+){3}/\d+")
_BARE = re.compile(_SLUG, re.IGNORECASE)

_Check = Callable[[Any], bool]


def _each(pattern: re.Pattern[str]) -> _Check:
    return lambda value: (
        isinstance(value, list)
        and all(isinstance(one, str) and bool(pattern.fullmatch(one)) for one in value)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _yes_or_no(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in ("true", "false")


# Key -> whether a value does, and what is told of those that do.
_KEYS: Mapping[str, tuple[_Check, str]] = {
    "id": (
        lambda value: _is_text(value) and bool(_OWNED.fullmatch(value)),
        "user/slug-of-the-title",
    ),
    "id_no": (lambda value: isinstance(value, int) and value > 0, "a whole number"),
    "title": (lambda value: _is_text(value) and len(value) >= 5, "five characters or more"),
    "code_file": (lambda value: _is_text(value) and bool(value), "a file in the same folder"),
    "language": (lambda value: value in ("python", "r", "rmarkdown"), "python, r, rmarkdown"),
    "kernel_type": (lambda value: value in ("notebook", "script"), "notebook, script"),
    "is_private": (_yes_or_no, "true, false"),
    "enable_gpu": (_yes_or_no, "true, false"),
    "enable_tpu": (_yes_or_no, "true, false"),
    "enable_internet": (_yes_or_no, "true, false"),
    "machine_shape": (_is_text, ", ".join(GPUS.values())),
    "dataset_sources": (_each(_VERSIONED), "a list of user/dataset"),
    "competition_sources": (_each(_BARE), "a list of competitions' slugs"),
    "kernel_sources": (_each(_VERSIONED), "a list of user/notebook"),
    "model_sources": (_each(_MODEL), "a list of owner/model/framework/variation/version"),
    "keywords": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list"),
    "docker_image": (_is_text, "an image's name"),
    "docker_image_pinning_type": (
        lambda value: value in ("original", "latest"),
        "original, latest",
    ),
}
_NEEDED = ("id", "title", "code_file", "language", "kernel_type")


def slug_of(title: str) -> str:
    """A title as Kaggle writes it into addresses: ``Train, once`` becomes ``train-once``."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def read_metadata(path: Path) -> dict[str, Any]:
    """The values of a kernel-metadata.json that a person may have written; empty without one.

    Raises:
        MetadataError: a key is unknown or a value wrong; all mistakes with their lines.
        ConfigError: it cannot be read.
    """
    if not path.exists():
        return {}
    layer = read_layer(path)
    refuse([*layer.mistakes, *_mistakes(layer, path.name)], MetadataError)
    return layer.values


def check_metadata(values: Mapping[str, Any], shown: str = FILE) -> None:
    """Refuse metadata with which Kaggle would do something else than is meant.

    Args:
        values: all of it.
        shown: the file's name, for messages.

    Raises:
        MetadataError: a key is unknown or missing, a value wrong, or title and id differ.
    """
    layer = Layer(values=dict(values), places={})
    missing = [key for key in _NEEDED if not values.get(key)]
    mistakes = [*_mistakes(layer, shown)]
    mistakes += [Mistake(place=shown, what=f"'{key}' is missing") for key in missing]
    if not mistakes and slug_of(values["title"]) != values["id"].partition("/")[2].lower():
        title, where = values["title"], values["id"]
        mistakes += [
            Mistake(
                place=shown,
                what=f"the title {title!r} does not belong to the id {where!r}",
                allowed=f"an id that ends in {slug_of(title)!r}",
                do="Kaggle goes by the title: change one of them, or delete the id",
            )
        ]
    refuse(mistakes, MetadataError)


def _mistakes(layer: Layer, shown: str) -> Iterator[Mistake]:
    for key, value in layer.values.items():
        place = layer.places.get((key,), shown)
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            do = f"did you mean {near[0]!r}?" if near else ""
            yield Mistake(place=place, what=f"unknown key {key!r}", allowed=", ".join(_KEYS), do=do)
        elif not _KEYS[key][0](value):
            yield Mistake(place=place, what=f"{key!r} is {value!r}", allowed=_KEYS[key][1])


# --- kaggle kernel ---


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


def _given(**sweep_config: bool | None) -> dict[str, bool]:
    return {key: wish for key, wish in sweep_config.items() if wish is not None}


def _joined(there: Mapping[str, Any], key: str, more: Sequence[str]) -> list[str]:
    """What is attached already and what comes to it, each once."""
    return list(dict.fromkeys([*there.get(key, ()), *more]))


def _text(notebook: NotebookNode) -> str:
    import nbformat

    return f"{nbformat.writes(notebook, version=4)}\n"
