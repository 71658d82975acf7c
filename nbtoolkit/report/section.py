"""Build a section, a title with tables, sentences and pictures, for a cell or a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import MissingExtra
from nbtoolkit.study.plots import STYLE
from nbtoolkit.text_table import html_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# --- picture ---
# A Matplotlib figure that is read on light and on dark pages.
#
# In a cell it is a PNG on a white card, since a cell's image cannot know the theme around it. In
# the report's page it is an SVG without a card, and its texts take the page's own colour.


INK = "#333333"
"""Of all texts: 12.6 to the white card; the page puts its own text colour there."""

_WIDTH, _HEIGHT = 4.0, 2.8  # inches of a panel
_CSS_DPI = 96  # pixels that a page counts to an inch
_SHRINKS = 0.8  # so far a narrow page makes it smaller; then it is scrolled, to stay readable
_DPI = 144  # twice as fine as it is shown, for screens of that kind


@dataclass(frozen=True)
class Picture:
    """A figure and what it shows, in words."""

    figure: Figure
    alt: str

    def __post_init__(self) -> None:
        from matplotlib.text import Text

        for panel in self.figure.axes:
            panel.tick_params(labelcolor=INK)
        for text in self.figure.findobj(Text):
            text.set_color(INK)

    def png(self) -> bytes:
        """For a cell, twice as large as it is to be shown."""
        file = io.BytesIO()
        with _drawing():
            self.figure.savefig(file, format="png", dpi=_DPI, facecolor="white")
        return file.getvalue()

    def width(self) -> int:
        """Pixels that the PNG is to be shown in."""
        return round(self.figure.get_figwidth() * _DPI / 2)

    def svg(self) -> str:
        """For a page: an ``<svg>`` element; its texts are texts, in the page's colour."""
        file = io.StringIO()
        # The salt makes ids that no other picture on the page has, and the same ones every time.
        more = {"svg.fonttype": "none", "svg.hashsalt": self.alt}
        with _drawing(more):
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        body = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        least = round(self.figure.get_figwidth() * _CSS_DPI * _SHRINKS)
        opening = f'<svg role="img" aria-label="{escape(self.alt)}" style="min-width: {least}px"'
        return body.replace("<svg", opening, 1).replace(INK, "currentColor")


def panels(count: int, across: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels, at most so many side by side.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            f"a report's plots need Matplotlib: {error}", do="pip install matplotlib"
        ) from error
    across = min(count, across)
    down = -(-count // across)
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH * across, _HEIGHT * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    for panel in axes[:count]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize("medium")
    return figure, axes[:count]


def legend_below(figure: Figure, handles: list[Any], labels: list[str]) -> None:
    """One legend for all panels, below them, as many columns as its names leave room for."""
    # a character takes about 0.09 inches at this size, the line before it 0.6
    room = figure.get_figwidth() / (0.09 * max(map(len, labels)) + 0.6)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(1, min(int(room), len(labels))),
        frameon=False,
        fontsize="small",
    )


@contextmanager
def _drawing(more: dict[str, Any] | None = None) -> Iterator[None]:
    """Draw in the style; a name's letters that the font lacks are no news: a table has the name."""
    from matplotlib import rc_context

    with rc_context(STYLE | (more or {})), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


# --- section ---


_NO_FORMULAS = "tex2jax_ignore mathjax_ignore"
"""Classes by which MathJax leaves a dollar sign alone; JupyterLab has it look at all outputs."""

_WIDE = '<table style="width: max-content">'  # it is scrolled rather than its words broken

Part: TypeAlias = str | Picture
"""HTML, whose values are escaped, or a picture."""


@dataclass
class ReportSection:
    """A part of a report; a cell shows it when it is its last value.

    Attributes:
        title: what it is about.
        parts: its contents in their order.
    """

    title: str
    parts: list[Part] = field(default_factory=list)

    def say(self, sentence: str) -> ReportSection:
        """Add a sentence."""
        self.parts.append(f"<p>{escape(sentence)}</p>")
        return self

    def head(self, text: str) -> ReportSection:
        """Add a heading below the section's own."""
        self.parts.append(f"<h3>{escape(text)}</h3>")
        return self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> ReportSection:
        """Add a table of short values; nothing where it has no rows."""
        if rows:
            wide = html_columns(header, rows).replace("<table>", _WIDE, 1)
            self.parts.append(wide)
        return self

    def html(self, markup: str) -> ReportSection:
        """Add HTML as it is: its values are escaped already."""
        self.parts.append(markup)
        return self

    def picture(self, picture: Picture) -> ReportSection:
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
