"""Directive ``settings``: every setting of a section, from its schema.

    .. settings:: nbtoolkit.config.schema.Config

For each setting: name, default, allowed values, effect, and the modules that read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import yaml
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.nodes import nested_parse_with_titles

import nbtoolkit
from nbtoolkit.config.fields import FreeSection, describe

PACKAGE = Path(nbtoolkit.__file__).parent


class Settings(Directive):
    """The settings of a model of pydantic and of its sections."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the entries as reStructuredText."""
        module, _, name = self.arguments[0].rpartition(".")
        text = StringList()
        for line in entries(getattr(import_module(module), name)):
            text.append(line, self.arguments[0])
        holder = nodes.section(document=self.state.document)
        nested_parse_with_titles(self.state, text, holder)
        return holder.children


def entries(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the entries of a model, its sections last, each under a heading of its own."""
    sections = {name: field for name, field in model.model_fields.items() if is_section(field)}
    for name, field in model.model_fields.items():
        if name not in sections:
            yield from entry(prefix + name, field)
    for name, field in sections.items():
        title = f"``{prefix}{name}``"
        yield from (title, "-" * len(title), "", as_text(field.description), "")
        yield from entries(field.annotation, f"{prefix}{name}.")


def entry(name: str, field: FieldInfo) -> Iterator[str]:
    """One setting."""
    hint: Any = field.annotation
    if field.metadata:
        hint = Annotated[(hint, *field.metadata)]
    allowed = "your own names and values" if hint is FreeSection else describe(hint)
    yield from (f".. confval:: {name}", f"   :default: ``{default_of(field)}``", "")
    yield from (f"   {as_text(field.description)}", "", f"   Allowed: {escaped(allowed)}.", "")
    if used := readers(name):
        yield from (f"   Read by {', '.join(f'``{path}``' for path in used)}.", "")


def is_section(field: FieldInfo) -> bool:
    """Whether a field holds a section of settings."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def default_of(field: FieldInfo) -> str:
    """Return a default as YAML writes it."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "(needed)"
    if isinstance(value, FreeSection):
        value = value.to_dict()
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]


def as_text(description: str | None) -> str:
    """Return a field's docstring, where `name` is code and :role:`name` a role, on one line."""
    return re.sub(r"(?<![:`])`([^`]+)`", r"``\1``", " ".join((description or "").split()))


def escaped(text: str) -> str:
    """Plain text as reStructuredText."""
    return re.sub(r"([*|\\_])", r"\\\1", text)


@cache
def sources() -> dict[str, str]:
    """Return the package's modules but those that define settings: path -> text."""
    paths = sorted(PACKAGE.rglob("*.py"))
    skip = ("config/", "views/", "panel/")
    return {
        relative: path.read_text()
        for path in paths
        if not (relative := path.relative_to(PACKAGE).as_posix()).startswith(skip)
    }


def readers(name: str) -> list[str]:
    """Return the modules that read a setting as an attribute of its section."""
    section, _, last = name.rpartition(".")
    owner = section.rpartition(".")[2] or "(config|settings)"
    pattern = re.compile(rf"\b_?{owner}\.{last}\b")
    return [path for path, text in sources().items() if pattern.search(text)][:6]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
