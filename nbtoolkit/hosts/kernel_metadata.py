"""kernel-metadata.json: what Kaggle's client is told of a notebook, checked before it is sent.

The keys are those of https://github.com/Kaggle/kaggle-cli/blob/main/docs/kernels_metadata.md and
of ``kaggle kernels init`` (kaggle 2.2.4). The client passes unknown keys over in silence, and an id
without an owner it sends.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nbtoolkit.errors import MetadataError
from nbtoolkit.yaml_lines import Layer, Mistake, read_layer, refuse

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


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _yes_or_no(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in ("true", "false")


# Key -> whether a value does, and what is told of those that do.
_KEYS: Mapping[str, tuple[_Check, str]] = {
    "id": (lambda value: _text(value) and bool(_OWNED.fullmatch(value)), "user/slug-of-the-title"),
    "id_no": (lambda value: isinstance(value, int) and value > 0, "a whole number"),
    "title": (lambda value: _text(value) and len(value) >= 5, "five characters or more"),
    "code_file": (lambda value: _text(value) and bool(value), "a file in the same folder"),
    "language": (lambda value: value in ("python", "r", "rmarkdown"), "python, r, rmarkdown"),
    "kernel_type": (lambda value: value in ("notebook", "script"), "notebook, script"),
    "is_private": (_yes_or_no, "true, false"),
    "enable_gpu": (_yes_or_no, "true, false"),
    "enable_tpu": (_yes_or_no, "true, false"),
    "enable_internet": (_yes_or_no, "true, false"),
    "machine_shape": (_text, ", ".join(GPUS.values())),
    "dataset_sources": (_each(_VERSIONED), "a list of user/dataset"),
    "competition_sources": (_each(_BARE), "a list of competitions' slugs"),
    "kernel_sources": (_each(_VERSIONED), "a list of user/notebook"),
    "model_sources": (_each(_MODEL), "a list of owner/model/framework/variation/version"),
    "keywords": (lambda value: isinstance(value, list) and all(map(_text, value)), "a list"),
    "docker_image": (_text, "an image's name"),
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
