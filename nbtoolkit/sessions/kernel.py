"""Write a notebook and its kernel-metadata.json into a folder for Kaggle's client."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from nbtoolkit.text_table import did_you_mean

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

Without a shape, Kaggle gives a P100, on which the image's torch does not run (sm_60).
"""

_SLUG = r"[a-z0-9]+(-[a-z0-9]+)*"
_OWNED = re.compile(rf"[\w-]+/{_SLUG}", re.IGNORECASE)
_VERSIONED = re.compile(rf"[\w-]+/{_SLUG}(/\d+)?", re.IGNORECASE)
_MODEL = re.compile(r"[\w.-]+(/[\w.-]+){3}/\d+")
_BARE = re.compile(_SLUG, re.IGNORECASE)

_Check = Callable[[object], bool]


def _list_of(pattern: re.Pattern[str]) -> _Check:
    return lambda value: (
        isinstance(value, list)
        and all(isinstance(item, str) and bool(pattern.fullmatch(item)) for item in value)
    )


def _one_of(*choices: str) -> tuple[_Check, str]:
    return (lambda value: value in choices), ", ".join(choices)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or str(value).lower() in ("true", "false")


_FLAG = (_is_flag, "true, false")

# Key -> check of a value, and the allowed values in words. The keys are those of
# https://github.com/Kaggle/kaggle-cli/blob/main/docs/kernels_metadata.md and of
# ``kaggle kernels init`` (kaggle 2.2.4). The client silently ignores unknown keys, and it sends an
# id without an owner.
_KEYS: Mapping[str, tuple[_Check, str]] = {
    "id": (
        lambda value: isinstance(value, str) and bool(_OWNED.fullmatch(value)),
        "user/slug-of-the-title",
    ),
    "id_no": (lambda value: isinstance(value, int) and value > 0, "a whole number"),
    "title": (
        lambda value: isinstance(value, str) and len(value) >= 5,
        "five characters or more",
    ),
    "code_file": (lambda value: _is_text(value) and bool(value), "a file in the same folder"),
    "language": _one_of("python", "r", "rmarkdown"),
    "kernel_type": _one_of("notebook", "script"),
    "is_private": _FLAG,
    "enable_gpu": _FLAG,
    "enable_tpu": _FLAG,
    "enable_internet": _FLAG,
    "machine_shape": (_is_text, ", ".join(GPUS.values())),
    "dataset_sources": (_list_of(_VERSIONED), "a list of user/dataset"),
    "competition_sources": (_list_of(_BARE), "a list of competitions' slugs"),
    "kernel_sources": (_list_of(_VERSIONED), "a list of user/notebook"),
    "model_sources": (_list_of(_MODEL), "a list of owner/model/framework/variation/version"),
    "keywords": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list"),
    "docker_image": (_is_text, "an image's name"),
    "docker_image_pinning_type": _one_of("original", "latest"),
}
_REQUIRED = ("id", "title", "code_file", "language", "kernel_type")


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


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a kernel-metadata.json, which may be edited by hand; {} if there is none.

    Raises:
        MetadataError: a key is unknown or a value wrong; lists all mistakes with their lines.
        ConfigError: the file cannot be read.
    """
    if not path.exists():
        return {}
    layer = read_layer(path)
    refuse([*layer.mistakes, *_mistakes(layer, path.name)], MetadataError)
    return layer.values


def check_metadata(values: Mapping[str, Any]) -> None:
    """Refuse metadata that Kaggle would misunderstand.

    Raises:
        MetadataError: a key is unknown or missing, a value wrong, or title and id differ.
    """
    mistakes = [*_mistakes(Layer(values=dict(values), places={}), FILE)]
    missing = [key for key in _REQUIRED if not values.get(key)]
    mistakes += [Mistake(place=FILE, what=f"'{key}' is missing") for key in missing]
    if not mistakes and slug_of(values["title"]) != values["id"].partition("/")[2].lower():
        mistakes.append(
            Mistake(
                place=FILE,
                what=f"the title {values['title']!r} does not belong to the id {values['id']!r}",
                allowed=f"an id that ends in {slug_of(values['title'])!r}",
                do="Kaggle uses the title: change one of them, or delete the id",
            )
        )
    refuse(mistakes, MetadataError)


def _mistakes(layer: Layer, shown: str) -> Iterator[Mistake]:
    for key, value in layer.values.items():
        place = layer.places.get((key,), shown)
        if key not in _KEYS:
            do = did_you_mean(key, _KEYS)
            yield Mistake(place=place, what=f"unknown key {key!r}", allowed=", ".join(_KEYS), do=do)
        elif not _KEYS[key][0](value):
            yield Mistake(place=place, what=f"{key!r} is {value!r}", allowed=_KEYS[key][1])


def write_kernel(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    settings: KernelSettings | None = None,
    parameters: Mapping[str, object] | None = None,
) -> Path:
    """Write a folder for ``kaggle kernels push -p FOLDER``.

    An existing kernel-metadata.json in the folder keeps its values, except for these settings.

    Args:
        path: the notebook; its copy has no outputs.
        output: the folder; default: ``outputs/kaggle/<slug>``.
        settings: settings of the notebook on Kaggle.
        parameters: values for the notebook's parameters, checked as for a run.

    Returns:
        The folder.

    Raises:
        MetadataError: Kaggle would refuse or misunderstand the metadata.
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
    existing = read_metadata(folder / FILE)
    title = settings.title or existing.get("title") or source.stem.replace("_", " ")
    metadata = {
        "is_private": True,
        "enable_gpu": False,
        "enable_tpu": False,
        "enable_internet": False,
        **existing,
        "id": f"{_owner(settings.user, existing)}/{slug_of(title)}",
        "title": title,
        "code_file": source.name,
        "language": "python",
        "kernel_type": "notebook",
        **_machine(settings.gpu),
    }
    flags = {"is_private": settings.private, "enable_internet": settings.internet}
    metadata |= {key: flag for key, flag in flags.items() if flag is not None}
    sources = {
        "dataset_sources": settings.datasets,
        "competition_sources": settings.competitions,
        "kernel_sources": settings.kernels,
    }
    for key, more in sources.items():
        metadata[key] = list(dict.fromkeys([*existing.get(key, ()), *more]))
    check_metadata(metadata)
    folder.mkdir(parents=True, exist_ok=True)
    copy = with_parameters(notebook, values)
    write_whole(folder / source.name, f"{nbformat.writes(copy, version=4)}\n")
    write_json(folder / FILE, metadata)
    return folder


def _owner(user: str | None, existing: Mapping[str, Any]) -> str:
    """Return the notebook's owner.

    Raises:
        MetadataError: no owner is given.
    """
    from_id = str(existing.get("id", "")).partition("/")[0]
    owner = user or from_id or os.environ.get("KAGGLE_USERNAME")
    if not owner:
        raise MetadataError(
            "the notebook has no owner: its id names no user",
            allowed="your name on Kaggle, as in the address of your profile",
            do="give it: --user NAME, or the variable KAGGLE_USERNAME",
        )
    return owner


def _machine(gpu: str | None) -> dict[str, object]:
    """Return the keys that choose a machine; {} without a choice.

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
