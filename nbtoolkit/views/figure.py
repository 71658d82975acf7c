"""Draw a result's charts as objects that a cell shows and that can be saved."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path

from nbtoolkit.errors import ReportFolderError
from nbtoolkit.run.paths import RunPaths, write_whole
from nbtoolkit.study.importance import Importance
from nbtoolkit.text_table import shortened
from nbtoolkit.views.chart import RUNNING
from nbtoolkit.views.markup import paragraph, view
from nbtoolkit.views.page import regions
from nbtoolkit.views.state import read_state

_SVG = re.compile(r'<svg[^>]* viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', re.DOTALL)
_WIDTHS = {"slices": 1100}  # pixels; a single chart has 560
_ROW, _BAR, _NAMES = 24, 220, 170  # units of an importance chart


class Chart:
    """A chart; a cell shows it if it is the cell's last value.

    Attributes:
        title: what it shows.
        html: HTML with SVG, without scripts.
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
        return self.html

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
    """Draw the share of each parameter as a bar with its range, and the notes below."""
    parts = []
    for index, share in enumerate(importance.shares):
        top = index * _ROW
        low, high = (_NAMES + _BAR * value for value in (share.low, share.high))
        parts.append(
            f'<text x="{_NAMES - 6}" y="{top + 15}" text-anchor="end">'
            f"{escape(shortened(share.name, 24))}</text>"
            f'<rect x="{_NAMES}" y="{top + 5}" width="{_BAR * share.value:.1f}" height="13" '
            f'fill="{RUNNING}" fill-opacity="0.55"/><path d="M{low:.1f},{top + 11.5}H{high:.1f}" '
            f'stroke="currentColor" stroke-width="1.5"/><text x="{_NAMES + _BAR + 6}" '
            f'y="{top + 15}">{share.text}</text>'
        )
    size = f'viewBox="0 0 {_NAMES + _BAR + 130} {_ROW * len(parts)}" style="max-width:560px"'
    title = f"importance for {metric}"
    drawn = (
        f'<svg role="img" aria-label="{escape(title, quote=True)}" {size} '
        f'font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    )
    notes = map(paragraph, importance.notes())
    return Chart(title, view(paragraph(title, strong=True), drawn, *notes))
