"""What decides a step's result; a step that was done with equal inputs is not run again."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbtoolkit
from nbtoolkit.config_layers import places_to_look
from nbtoolkit.errors import PipelineError
from nbtoolkit.pipeline.parameters import Published
from nbtoolkit.pipeline.step import Step

_NAMED_FILE = re.compile(r"""["']([^"'\n]+\.(?:ya?ml|json))["']""")

_WORDS = {
    "code": "the notebook's code has changed",
    "nbtoolkit": "nbtoolkit has another version",
    "after": "what was done before it has other results",
}


def inputs_of(step: Step, values: Mapping[str, Any], published: Published) -> dict[str, Any]:
    """The inputs of a step as plain values, to be compared with those of an earlier run.

    Args:
        step: the step.
        values: its parameters, resolved.
        published: what the steps before it published.

    Raises:
        PipelineError: a file it depends on is not there.
    """
    return {
        "code": _hash("\0".join(step.glance.code).encode()),
        "parameters": _plain(values),
        "settings": {name: _hash(path.read_bytes()) for name, path in _settings(step, values)},
        "files": {name: _hash(Path(name).read_bytes()) for name in _files(step)},
        "after": {name: _hash(_text(published[name])) for name in step.wishes.after},
        "nbtoolkit": nbtoolkit.__version__,
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is different in the inputs, in words; empty: nothing."""
    told = []
    for part in now:
        earlier, later = before.get(part), now[part]
        if part == "settings":  # one that is there only now was written by the step itself
            later = {name: later.get(name) for name in earlier or ()}
        if earlier != later:
            told.append(_WORDS.get(part) or f"other {part}: {_names(earlier, later)}")
    return "; ".join(told)


def without_own(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a step that was run, without settings files that it wrote itself.

    Args:
        before: its inputs before it ran.
        after: the same looked at again.
    """
    kept = {n: one for n, one in before["settings"].items() if after["settings"].get(n) == one}
    return {**before, "settings": kept}


def _settings(step: Step, values: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """The YAML and JSON files that parameters or code name, if they are there."""
    texts = [value for value in values.values() if isinstance(value, str)]
    named = [text for text in texts if text.endswith((".yaml", ".yml", ".json"))]
    for name in dict.fromkeys([*named, *_NAMED_FILE.findall("\n".join(step.glance.code))]):
        found = (path for path in places_to_look(Path(name).expanduser()) if path.is_file())
        if path := next(found, None):
            yield name, path


def _files(step: Step) -> list[str]:
    patterns = step.wishes.files
    return [name for pattern in patterns for name in _matching(pattern, step.place("files"))]


def _matching(pattern: str, place: str) -> list[str]:
    """The names of a pattern's files.

    Raises:
        PipelineError: there is none.
    """
    names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    found = [name for name in names if Path(name).is_file()]
    if not found:
        raise PipelineError(
            f"{place}: there is no file {pattern!r}",
            allowed="files or patterns (src/**/*.py), from the working directory",
        )
    return found


def _names(before: Any, now: Mapping[str, Any]) -> str:
    earlier: Mapping[str, Any] = before if isinstance(before, Mapping) else {}
    missing = object()
    names = dict.fromkeys([*earlier, *now])
    return ", ".join(n for n in names if earlier.get(n, missing) != now.get(n, missing))


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(_text(value))


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_listed).encode()


def _listed(value: Any) -> Any:
    """A set in an order; else as a text."""
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else str(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
