"""Write everything in a folder of runs as one HTML page (``nb.report``)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path, PosixPath

from nbtoolkit.cards import Card, Part, Table, Text, Tiles, html
from nbtoolkit.config.fields import flat_settings
from nbtoolkit.errors import ReportFolderError
from nbtoolkit.run.identity import decides_result
from nbtoolkit.run.paths import EVENTS, KIND_NAMES, RunPaths, age_key, write_whole
from nbtoolkit.text_table import counted, duration, metric_column, moment, shortened
from nbtoolkit.views.chart import PALETTE
from nbtoolkit.views.page import cards_of
from nbtoolkit.views.run_cards import metric_charts, run_lines
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.text import (
    curves_of,
    devices_of,
    differing,
    error_of,
    explanation,
    final_values,
    name_of,
    status_of,
)

FILE = "report.html"

DEPTH = 4
"""Levels of folders below the reported one in which runs are looked for."""

PAGES = 8
"""The newest runs whose pages are in a report."""

_METRICS = 5  # columns of the table of runs

# Text has a contrast of 15 and more to its background, dimmed text 6 and more (WCAG AA: 4.5).
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1f2328; --dim: #59636e;
  --line: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #111; --text: #e6e6e6; --dim: #9aa4af; --line: #3d444d; } }
body { background: var(--ground); color: var(--text); margin: 0 auto; max-width: 80rem;
  padding: 1rem 1.5rem 4rem; font: 13px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .5rem;
  border-top: 1px solid var(--line); }
nav a { color: inherit; margin-right: 1rem; } .dim { color: var(--dim); }
"""


def report(
    folder: str | os.PathLike[str] = "outputs", output: str | os.PathLike[str] | None = None
) -> ReportPath:
    """Write an HTML page about all runs in a folder.

    The function only reads the files of the runs, and executes nothing in them. The page contains:

    - a table of the runs;
    - the pages of the newest eight runs, sweeps and cross-validations, as the panel shows them;
    - a comparison of single runs, with learning curves and the settings that differ.

    The page is a single file. It needs no network, and it fits light and dark themes.

    Args:
        folder: a run's folder, or a folder that contains runs.
        output: the path of the page; None: ``report.html`` in ``folder``.

    Returns:
        The path of the page. A cell shows the contents of the page if this is its last value.

    Raises:
        ReportFolderError: there is no such folder, or the page cannot be written.
    """
    contents = read_report(folder)
    target = contents.folder / FILE if output is None else Path(output).expanduser().absolute()
    subtitle = f"{counted(len(contents.runs), 'run')} in {contents.folder}"
    text = page(f"Report on {contents.folder.name}", subtitle, contents.sections)
    try:
        write_whole(target, text, durable=False)
    except OSError as error:
        raise ReportFolderError(
            f"the report {target} cannot be written: {error.strerror or error}",
            allowed="a file in a folder on a disk with free space that you may write to",
            do='choose another file: output="report.html", or --output in a shell',
        ) from error
    written = ReportPath(target)
    written.contents = contents
    return written


class ReportPath(PosixPath):
    """The path of a report, which shows the report when it is a cell's last value.

    Attributes:
        contents: the sections of the report; None: of a path that was made from this one.
    """

    contents: RunsReport | None = None

    def _repr_html_(self) -> str | None:
        return None if self.contents is None else self.contents._repr_html_()


def read_report(folder: str | os.PathLike[str]) -> RunsReport:
    """Read the runs in a folder.

    Args:
        folder: a run's folder, or one that holds runs, at most four levels below it.

    Raises:
        ReportFolderError: there is no such folder, or it is another user's.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ReportFolderError(
            f"there is no folder {path} to report on",
            allowed="a run's folder, or one that holds runs: runtime.output_dir",
            do='name it: nb.report("outputs"), or nbtoolkit report outputs',
        )
    try:
        os.listdir(path)
    except OSError as error:
        raise ReportFolderError(
            f"the folder {path} cannot be read: {error.strerror}",
            allowed="a folder that this user may read; by default only its owner may read a run's",
            do=f"let its owner share it: chmod go+rX {path}",
        ) from error
    return RunsReport(path, [read_state(paths.folder) for paths in runs_below(path)])


def runs_below(folder: Path) -> list[RunPaths]:
    """Find the runs in a folder, oldest first, without the trials and folds inside them."""
    return sorted(_runs(folder, DEPTH), key=lambda paths: (age_key(paths.folder), paths.folder))


def _runs(folder: Path, depth: int) -> Iterator[RunPaths]:
    if os.path.isfile(folder / EVENTS):
        yield RunPaths(folder)
        return
    if not depth:
        return
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # another user's
        return
    for entry in entries:
        yield from _runs(Path(entry), depth - 1)


@dataclass
class ReportSection:
    """A section of a report; a cell shows it when it is the cell's last value.

    Attributes:
        title: its heading.
        cards: its contents; empty: there is nothing to show.
    """

    title: str
    cards: list[Card] = field(default_factory=list)

    def _repr_html_(self) -> str:
        return html(self.cards)

    def __repr__(self) -> str:
        return f"ReportSection({self.title!r}, {counted(len(self.cards), 'card')})"


class RunsReport:
    """The sections of a report; each is made when it is first used.

    Attributes:
        folder: the reported folder.
        runs: the runs, sweeps and cross-validations in it, oldest first.
    """

    def __init__(self, folder: Path, runs: Sequence[State]) -> None:
        self.folder = folder
        self.runs = list(runs)

    @property
    def sections(self) -> list[ReportSection]:
        """The sections that have contents, in the order of the page."""
        sections = [self.overview, *self.pages, self.comparison]
        return [section for section in sections if section.cards]

    @cached_property
    def overview(self) -> ReportSection:
        """All runs in one table; below, what is wrong with those that did not complete."""
        runs = self.runs
        if not runs:
            return ReportSection("Runs", [Card("", [Text("There are no runs in this folder.")])])
        values = [final_values(run) for run in runs]
        counts = Counter(name for numbers in values for name in numbers)
        ranked = sorted(counts, key=lambda name: (not name.startswith("val_"), -counts[name]))
        metrics = ranked[:_METRICS]
        columns = [
            [label(run) for run in runs],
            [KIND_NAMES[run.kind] for run in runs],
            [status_of(run) for run in runs],
            *(metric_column([numbers.get(name) for numbers in values]) for name in metrics),
            [_took(run) for run in runs],
            [shortened(devices_of(run.plan), 32) for run in runs],
            [moment(run.first_began) for run in runs],
        ]
        names = [shortened(metric, 28) for metric in metrics]
        header = ["run", "what", "status", *names, "took", "device", "began (UTC)"]
        problems = [
            Text(f"{label(run)}: {shortened(text, 300)}", "alert")
            for run in runs
            for text in (explanation(run), error_of(run))
            if text
        ]
        table = Table(header, [*zip(*columns, strict=True)])
        return ReportSection("Runs", [Card("", [table, *problems], span=4)])

    @cached_property
    def pages(self) -> list[ReportSection]:
        """The pages of the newest eight runs, sweeps and cross-validations, newest first."""
        newest = reversed(self.runs[-PAGES:])
        return [ReportSection(label(run), [*cards_of(run).values()]) for run in newest]

    @cached_property
    def comparison(self) -> ReportSection:
        """Learning curves and differing settings of the newest single runs; empty below two."""
        single = [run for run in self.runs if run.kind == "run"]
        compared = single[-len(PALETTE) :]
        if len(compared) < 2:
            return ReportSection("Comparison")
        few = f"the newest {len(compared)} of {len(single)} runs"
        labels = [label(run) for run in compared]
        pictures = metric_charts(
            [
                line
                for run, name, colour in zip(compared, labels, PALETTE, strict=False)
                for line in run_lines(name, curves_of(run), colour)
            ],
            "step",
        )
        rows = differing([flat_settings(run.config) for run in compared])
        rows.sort(key=lambda row: not decides_result(row[0], compared[-1].config))
        equal = Text("The settings of all these runs are equal.")
        table = Table(["setting", *labels], rows) if rows else equal
        parts: list[Part] = [Tiles(pictures, 300)] if pictures else []
        note = few if len(compared) < len(single) else ""
        card = Card("Single runs", [*parts, table], span=4, note=note)
        return ReportSection("Comparison", [card])

    def _repr_html_(self) -> str:
        return "".join(
            f"<h3>{escape(section.title)}</h3>{section._repr_html_()}" for section in self.sections
        )

    def __repr__(self) -> str:
        return f"Report({counted(len(self.runs), 'run')}, {self.folder})"


def label(run: State) -> str:
    """Return a run's name, short enough for a table's header or a legend."""
    return shortened(name_of(run), 28)


def _took(run: State) -> str:
    attempts = f", in {run.attempts} attempts" if run.attempts > 1 else ""
    return duration(run.elapsed()) + attempts


def page(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """Render the HTML page, which needs no other file, light or dark as the reader's system.

    Args:
        title: its heading.
        subtitle: a sentence below.
        sections: its contents.
    """
    links = "".join(
        f'<a href="#part{number}">{escape(shortened(section.title, 28))}</a>'
        for number, section in enumerate(sections)
    )
    body = "".join(
        f'<h2 id="part{number}">{escape(section.title)}</h2>{html(section.cards, images=False)}'
        for number, section in enumerate(sections)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="dim">{escape(subtitle)}</p>
<nav>{links}</nav>
{body}
</body>
</html>
"""
