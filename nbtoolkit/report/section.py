"""Build report sections from tables, sentences and pictures."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import MissingExtra
from nbtoolkit.study.plots import STYLE
from nbtoolkit.text_table import html_columns

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK = "#333333"
"""The colour of text in a figure: a contrast of 12.6 to white; a page replaces it by its own."""

_WIDTH, _HEIGHT = 4.0, 2.8  # inches of a panel
_CSS_DPI = 96  # pixels of a page per inch
_SHRINKS = 0.8  # the smallest scale on a narrow page, which scrolls beyond that
_DPI = 144  # of the PNG, for screens with twice as many pixels


@dataclass(frozen=True)
class Picture:
    """A Matplotlib figure that is readable in light and dark themes.

    In a cell it is a PNG on white, since an image in a cell does not know the theme around it. On
    the report's page it is an SVG without a background, and its text takes the page's colour.

    Attributes:
        figure: the figure.
        alt: what it shows, in words.
    """

    figure: Figure
    alt: str

    def __post_init__(self) -> None:
        from matplotlib.text import Text

        for panel in self.figure.axes:
            panel.tick_params(labelcolor=INK)
        for text in self.figure.findobj(Text):
            text.set_color(INK)

    def png(self) -> bytes:
        """Render it for a cell, at twice the size at which it is shown."""
        file = io.BytesIO()
        with _drawing({}):
            self.figure.savefig(file, format="png", dpi=_DPI, facecolor="white")
        return file.getvalue()

    def width(self) -> int:
        """The width at which the PNG is shown, in pixels."""
        return round(self.figure.get_figwidth() * _DPI / 2)

    def svg(self) -> str:
        """Render it for a page: an ``<svg>`` element whose text is text, in the page's colour."""
        file = io.StringIO()
        # The salt makes its ids unique on the page, and the same in every report.
        with _drawing({"svg.fonttype": "none", "svg.hashsalt": self.alt}):
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        body = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        least = round(self.figure.get_figwidth() * _CSS_DPI * _SHRINKS)
        opening = f'<svg role="img" aria-label="{escape(self.alt)}" style="min-width: {least}px"'
        return body.replace("<svg", opening, 1).replace(INK, "currentColor")


@contextmanager
def _drawing(options: Mapping[Any, Any]) -> Iterator[None]:
    """Draw in the report's style, with more of Matplotlib's settings.

    Without warnings for letters that the font lacks: a table has the name as well.
    """
    from matplotlib import rc_context

    with rc_context({**STYLE, **options}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def panels(count: int, across: int = 3) -> tuple[Figure, list[Axes]]:
    """Make a figure with ``count`` panels, at most ``across`` side by side.

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


def legend_below(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Add one legend for all panels below them, with as many columns as fit."""
    # A character takes about 0.09 inches at this size, the line before it 0.6.
    columns = figure.get_figwidth() / (0.09 * max(map(len, labels)) + 0.6)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(1, min(int(columns), len(labels))),
        frameon=False,
        fontsize="small",
    )


Part: TypeAlias = str | Picture
"""HTML, whose values are escaped, or a picture."""


@dataclass
class ReportSection:
    """A section of a report; a cell shows it when it is the cell's last value.

    Attributes:
        title: its heading.
        parts: its contents, in order.
    """

    title: str
    parts: list[Part] = field(default_factory=list)

    def paragraph(self, text: str) -> ReportSection:
        """Add a paragraph."""
        self.parts.append(f"<p>{escape(text)}</p>")
        return self

    def heading(self, text: str) -> ReportSection:
        """Add a heading."""
        self.parts.append(f"<h3>{escape(text)}</h3>")
        return self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> ReportSection:
        """Add a table of short values, which scrolls rather than wraps; nothing without rows."""
        if rows:
            wide = '<table style="width: max-content">'
            self.parts.append(html_columns(header, rows).replace("<table>", wide, 1))
        return self

    def html(self, markup: str) -> ReportSection:
        """Add HTML whose values are escaped already."""
        self.parts.append(markup)
        return self

    def picture(self, picture: Picture) -> ReportSection:
        """Add a picture."""
        self.parts.append(picture)
        return self

    def _ipython_display_(self) -> None:
        display: Any = import_module("IPython.display")  # its functions are not annotated
        for part in self.parts:
            if isinstance(part, Picture):
                image = display.Image(part.png(), width=part.width(), metadata={"alt": part.alt})
                display.display(image)
            else:
                # JupyterLab runs MathJax on all outputs; these classes keep it from dollar signs.
                classes = "tex2jax_ignore mathjax_ignore"
                display.display(display.HTML(f'<div class="{classes}">{part}</div>'))

    def __repr__(self) -> str:
        pictures = sum(isinstance(part, Picture) for part in self.parts)
        return f"Section({self.title!r}, {len(self.parts)} parts, {pictures} pictures)"
