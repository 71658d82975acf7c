"""Draw a result's charts as objects that a cell shows and that can be saved."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path

from nbtoolkit.errors import ReportFolderError
from nbtoolkit.run.output import Curves
from nbtoolkit.run.paths import RunPaths, write_whole
from nbtoolkit.study.importance import Importance
from nbtoolkit.text_table import shortened
from nbtoolkit.views.chart import PALETTE, RUNNING, Axis, Series, as_images, chart
from nbtoolkit.views.markup import data_table, paragraph, view
from nbtoolkit.views.page import regions
from nbtoolkit.views.state import read_state

_SVG = re.compile(r'<svg[^>]* viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', re.DOTALL)
_WIDTHS = {"slices": 1100}  # pixels; a single chart has 560


class Chart:
    """A chart; a cell shows it if it is the cell's last value.

    Attributes:
        title: what it shows.
        html: HTML with SVG, without scripts; a cell shows its charts as images.
    """

    def __init__(self, title: str, html: str) -> None:
        self.title, self.html = title, html

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
        """The charts below each other in one image."""
        top, parts = 0, []
        for width, height, shapes in _SVG.findall(self.html):
            size = f'width="{width}" height="{height}"'
            parts.append(f'<svg y="{top}" {size} viewBox="0 0 {width} {height}">{shapes}</svg>')
            top += int(height) + 8
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 440 {top or 1}"'
        return f'{opening} font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'

    def _repr_html_(self) -> str:
        return as_images(self.html)

    def __repr__(self) -> str:
        return f"Chart({self.title!r})"


# --- the functions that nbtoolkit.run.output.charts() finds here ---


def result_chart(paths: RunPaths, region: str) -> Chart:
    """Draw one region of a result's page: ``"history"``, ``"curves"`` or ``"slices"``."""
    card = regions(read_state(paths.folder), only=[region]).get(region) or paragraph(
        "There is nothing to draw."
    )
    style = f"max-width:{_WIDTHS.get(region, 560)}px"
    return Chart(f"{region} of {paths.run_id}", view(f'<div style="{style}">{card}</div>'))


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
    table = data_table(["parameter", "share"], rows)
    notes = "".join(map(paragraph, importance.notes()))
    inside = f"{paragraph(title)}{drawn}{table}{notes}"
    return Chart(title, view(f'<div style="max-width:560px">{inside}</div>'))


def curves_chart(title: str, curves: Curves) -> Chart:
    """Draw curves below each other, on logarithmic axes where they span a factor of 50.

    Args:
        title: what they show.
        curves: names of the two axes of a picture -> the name of each of its curves -> its points.
    """
    parts = []
    for (x, y), named in curves.items():
        series = [
            Series(name, points, colour=PALETTE[index % len(PALETTE)])
            for index, (name, points) in enumerate(named.items())
        ]
        points = [point for one in named.values() for point in one]
        across = [position for position, _ in points]
        log = max(across) > 50 * min(across)
        parts.append(
            chart(
                series,
                x=Axis(x, log=log, integer=not log),
                y=Axis(y, low=None if log else 0.0, log=log),
                legend=True,
            )
        )
    inside = "".join(parts) or paragraph("There is nothing to draw.")
    return Chart(title, view(f'<div style="max-width:560px">{inside}</div>'))
