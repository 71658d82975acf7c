"""Draw a result's charts as objects that a cell shows and that can be saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from nbtoolkit.cards import RUNNING, Card, Part, Picture, Table, Text, Tiles, html, svg_file
from nbtoolkit.errors import ReportFolderError
from nbtoolkit.run.output import Curves
from nbtoolkit.run.paths import RunPaths, write_whole
from nbtoolkit.search.study.importance import Importance
from nbtoolkit.text_table import shortened
from nbtoolkit.views.chart import PALETTE, Axis, Series, chart
from nbtoolkit.views.page import cards_of
from nbtoolkit.views.state import read_state


class Chart:
    """A chart; a cell shows it if it is the cell's last value.

    Attributes:
        title: what it shows.
        cards: its contents.
    """

    def __init__(self, title: str, cards: Sequence[Card]) -> None:
        self.title = title
        self.cards = cards

    @property
    def html(self) -> str:
        """HTML with SVG, without scripts."""
        return html(self.cards, images=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the chart to a file.

        Args:
            path: a name that ends with ``.svg`` (an image) or ``.html`` (a page).

        Returns:
            The file's absolute path.

        Raises:
            ReportFolderError: the name has another ending.
            OSError: the file cannot be written.
        """
        file = Path(path).expanduser().absolute()
        texts = {".svg": self._svg, ".html": self._page}
        if file.suffix not in texts:
            raise ReportFolderError(
                f"a chart cannot be saved as {file.name}",
                allowed="a name that ends with .svg or .html",
                do="choose such a name; a browser prints a page as PDF",
            )
        write_whole(file, texts[file.suffix](), durable=False)
        return file

    def _page(self) -> str:
        title = f'<meta charset="utf-8"><title>{escape(self.title)}</title>'
        font = "font-family:system-ui,sans-serif"
        return (
            f'<!DOCTYPE html><html lang="en">{title}<body style="{font}">{self.html}</body></html>'
        )

    def _svg(self) -> str:
        """Return the charts below each other in one image."""
        return svg_file([picture for card in self.cards for picture in _pictures(card.parts)])

    def _repr_html_(self) -> str:
        return html(self.cards)

    def __repr__(self) -> str:
        return f"Chart({self.title!r})"


def _pictures(parts: Sequence[Part]) -> list[Picture]:
    pictures = []
    for part in parts:
        if isinstance(part, Picture):
            pictures.append(part)
        elif isinstance(part, Tiles):
            for group in part.groups:
                pictures += _pictures(group)
    return pictures


def result_chart(paths: RunPaths, name: str) -> Chart:
    """Draw one card of a result's page: ``"history"``, ``"curves"`` or ``"slices"``."""
    nothing = Card("", [Text("There is nothing to draw.")])
    card = cards_of(read_state(paths.folder), only=[name]).get(name, nothing)
    return Chart(f"{name} of {paths.run_id}", [card])


def importance_chart(importance: Importance, metric: str) -> Chart:
    """Draw the share of each parameter; below, the numbers and the notes."""
    shares = importance.shares
    names = tuple(shortened(share.name, 24) for share in shares)
    values = [(float(index), share.value) for index, share in enumerate(shares)]
    title = f"importance for {metric}"
    drawn = chart(
        [Series("share", values, "ring", RUNNING)],
        x=Axis(choices=names),
        y=Axis(title, low=0.0, high=1.0),
        legend=True,
        size=(max(330, 80 * len(shares)), 180),
    )
    rows = [[name, f"{share.value:.2f}"] for name, share in zip(names, shares, strict=True)]
    notes = [Text(note) for note in importance.notes()]
    return Chart(title, [Card(title, [drawn, Table(["parameter", "share"], rows), *notes])])


def curves_chart(title: str, curves: Curves) -> Chart:
    """Draw curves below each other, on logarithmic axes where they span a factor of 50.

    Args:
        title: what they show.
        curves: names of the two axes of a picture -> the name of each of its curves -> its points.
    """
    pictures: list[Part] = []
    for (x, y), named in curves.items():
        series = [
            Series(name, points, colour=PALETTE[index % len(PALETTE)])
            for index, (name, points) in enumerate(named.items())
        ]
        across = [position for points in named.values() for position, _ in points]
        log = max(across) > 50 * min(across)
        pictures.append(
            chart(
                series,
                x=Axis(x, log=log, integer=not log),
                y=Axis(y, low=None if log else 0.0, log=log),
                legend=True,
            )
        )
    return Chart(title, [Card("", pictures or [Text("There is nothing to draw.")])])
