"""Section: a title with tables, sentences and pictures: shown in a cell, and written to a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import Any, TypeAlias

from nbtoolkit.report.picture import Picture
from nbtoolkit.runtime.table import html_columns

_NO_FORMULAS = "tex2jax_ignore mathjax_ignore"
"""Classes by which MathJax leaves a dollar sign alone; JupyterLab has it look at all outputs."""

_WIDE = '<table style="width: max-content">'  # it is scrolled rather than its words broken

Part: TypeAlias = str | Picture
"""HTML, whose values are escaped, or a picture."""


@dataclass
class Section:
    """A part of a report; a cell shows it when it is its last value.

    Attributes:
        title: what it is about.
        parts: its contents in their order.
    """

    title: str
    parts: list[Part] = field(default_factory=list)

    def say(self, sentence: str) -> Section:
        """Add a sentence."""
        self.parts.append(f"<p>{escape(sentence)}</p>")
        return self

    def head(self, text: str) -> Section:
        """Add a heading below the section's own."""
        self.parts.append(f"<h3>{escape(text)}</h3>")
        return self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
        """Add a table of short values; nothing where it has no rows."""
        if rows:
            wide = html_columns(header, rows).replace("<table>", _WIDE, 1)
            self.parts.append(wide)
        return self

    def html(self, markup: str) -> Section:
        """Add HTML as it is: its values are escaped already."""
        self.parts.append(markup)
        return self

    def picture(self, picture: Picture) -> Section:
        """Add a picture."""
        self.parts.append(picture)
        return self

    def _ipython_display_(self) -> None:
        shown: Any = import_module("IPython.display")  # its functions have no annotations
        for part in self.parts:
            if isinstance(part, Picture):
                picture = shown.Image(part.png(), width=part.width(), metadata={"alt": part.alt})
                shown.display(picture)
            else:
                shown.display(shown.HTML(f'<div class="{_NO_FORMULAS}">{part}</div>'))

    def __repr__(self) -> str:
        pictures = sum(isinstance(part, Picture) for part in self.parts)
        return f"Section({self.title!r}, {len(self.parts)} parts, {pictures} pictures)"
