"""Write everything in a folder of runs as one HTML page (``nb.report``)."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path, PosixPath
from statistics import median

from nbtoolkit.config.fields import flat_settings
from nbtoolkit.errors import ReportFolderError
from nbtoolkit.report.predictions import NoPredictions, Predictions, joined, predictions_of
from nbtoolkit.run.identity import decides_result
from nbtoolkit.run.paths import EVENTS, KIND_NAMES, TRASH, RunPaths, age_key, write_whole
from nbtoolkit.text_table import counted, duration, metric_column, moment, shortened
from nbtoolkit.views.chart import PALETTE, RUNNING, Axis, Series, as_images, chart
from nbtoolkit.views.markup import alert, card, data_table, grid, paragraph, tiles, view
from nbtoolkit.views.page import page_html
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
_RUNS = 4  # the newest that have predictions
_CLASSES = 20  # a larger matrix is unreadable; the most frequent mistakes are listed instead
_MISTAKES = 5
_NAME = 24  # characters of a class
_BLUE = "42, 127, 201"  # RUNNING; at most half of it, so that the page's text stays readable
_DARKEST = 0.5

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
    - a comparison of single runs, with learning curves and the settings that differ;
    - predictions, throughput and device use.

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
        if entry.name != TRASH:
            yield from _runs(Path(entry), depth - 1)


# --- sections ---


@dataclass
class ReportSection:
    """A section of a report; a cell shows it when it is the cell's last value.

    Attributes:
        title: its heading.
        parts: its contents, as HTML; empty: there is nothing to show.
    """

    title: str
    parts: list[str] = field(default_factory=list)

    def _repr_html_(self) -> str:
        return as_images(view(*self.parts))

    def __repr__(self) -> str:
        return f"ReportSection({self.title!r}, {counted(len(self.parts), 'part')})"


class RunsReport:
    """The sections of a report; each is made when it is first used.

    Attributes:
        folder: the reported folder.
        runs: the runs, sweeps and cross-validations in it, oldest first.
    """

    def __init__(self, folder: Path, runs: Sequence[State]) -> None:
        self.folder, self.runs = folder, list(runs)

    @property
    def sections(self) -> list[ReportSection]:
        """The sections that have contents, in the order of the page."""
        after = [self.comparison, self.predictions, self.throughput]
        return [one for one in (self.overview, *self.pages, *after) if one.parts]

    @cached_property
    def overview(self) -> ReportSection:
        """All runs in one table; below, what is wrong with those that did not complete."""
        runs = self.runs
        if not runs:
            return ReportSection("Runs", [paragraph("There are no runs in this folder.")])
        values = [final_values(run) for run in runs]
        counts = Counter(name for one in values for name in one)
        ranked = sorted(counts, key=lambda name: (not name.startswith("val_"), -counts[name]))
        metrics = ranked[:_METRICS]
        columns = [
            [label(run) for run in runs],
            [KIND_NAMES[run.kind] for run in runs],
            [status_of(run) for run in runs],
            *(metric_column([one.get(name) for one in values]) for name in metrics),
            [_took(run) for run in runs],
            [shortened(devices_of(run.plan), 32) for run in runs],
            [moment(run.first_began) for run in runs],
        ]
        names = [shortened(metric, 28) for metric in metrics]
        header = ["run", "what", "status", *names, "took", "device", "began (UTC)"]
        problems = [
            alert(f"{label(run)}: {shortened(text, 300)}")
            for run in runs
            for text in (explanation(run), error_of(run))
            if text
        ]
        table = data_table(header, [*zip(*columns, strict=True)])
        return ReportSection("Runs", [table, *problems])

    @cached_property
    def pages(self) -> list[ReportSection]:
        """The pages of the newest eight runs, sweeps and cross-validations, newest first."""
        newest = reversed(self.runs[-PAGES:])
        return [ReportSection(label(run), [page_html(run)]) for run in newest]

    @cached_property
    def comparison(self) -> ReportSection:
        """Learning curves and differing settings of the newest single runs; empty below two."""
        single = [run for run in self.runs if run.kind == "run"]
        compared = single[-len(PALETTE) :]
        if len(compared) < 2:
            return ReportSection("Comparison")
        few = f"The newest {len(compared)} of {len(single)} runs."
        parts = [paragraph(few)] if len(compared) < len(single) else []
        labels = [label(run) for run in compared]
        pictures = metric_charts(
            [
                line
                for run, name, colour in zip(compared, labels, PALETTE, strict=False)
                for line in run_lines(name, curves_of(run), colour)
            ],
            "step",
        )
        parts += [tiles(pictures, 300)] if pictures else []
        rows = differing([flat_settings(run.config) for run in compared])
        rows.sort(key=lambda row: not decides_result(row[0], compared[-1].config))
        equal = paragraph("The settings of all these runs are equal.")
        parts.append(data_table(["setting", *labels], rows) if rows else equal)
        return ReportSection("Comparison", parts)

    @cached_property
    def predictions(self) -> ReportSection:
        """The newest runs' predictions, of a cross-validation those out of fold; or why not."""
        cards: list[str] = []
        reasons: list[str] = []
        for run in reversed([run for run in self.runs if run.kind != "sweep"]):
            try:
                found = _predictions(run)
            except NoPredictions as reason:
                reasons.append(paragraph(f"{label(run)}: {reason}."))
                continue
            if found is not None and len(cards) < _RUNS:
                title = f"{label(run)}, {'out of fold' if run.kind == 'cv' else 'validation'}"
                cards.append(card(title, _drawn(found), span=2))
        return ReportSection("Predictions", ([grid(*cards)] if cards else []) + reasons)

    @cached_property
    def throughput(self) -> ReportSection:
        """Samples per second and device use of runs and folds."""
        cells = {label(run): _use(run) for run in self.runs}
        for run in self.runs:
            folds = run.fold_runs().items()
            cells |= {f"{label(run)}, fold {number}": _use(fold) for number, fold in folds}
        columns = dict.fromkeys(column for row in cells.values() for column in row)
        rows = [
            [name, *(row.get(column, "") for column in columns)]
            for name, row in cells.items()
            if row
        ]
        parts = [data_table(["run", *columns], rows)] if rows else []
        return ReportSection("Throughput and device use", parts)

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


def _use(run: State) -> dict[str, str]:
    """The cells of a run, by column."""
    rates = [rate for _, rate in run.logged.get("samples_per_second", ())]
    cells = {"samples a second (median)": f"{median(rates):,.0f}"} if rates else {}
    return cells | {device.name: device.text for device in run.devices()}


def _predictions(run: State) -> Predictions | None:
    if run.kind == "run":
        return predictions_of(run.paths)
    files = sorted(run.paths.folder.glob("folds/*/values/0.pkl"))
    parts = [predictions_of(RunPaths(file.parents[1])) for file in files]
    return joined([part for part in parts if part is not None]) if any(parts) else None


def _drawn(found: Predictions) -> str:
    if not found.are_classes:
        points = list(zip(map(float, found.true), map(float, found.predicted), strict=True))
        ends = [min(map(min, points)), max(map(max, points))]
        diagonal = Series("equal", [(end, end) for end in ends], "dashed")
        dots = Series("samples", points, "dots", RUNNING)
        return chart([diagonal, dots], x=Axis("true"), y=Axis("predicted"), legend=True)
    parts = [paragraph(f"{found.accuracy:.4f} of {counted(len(found.true), 'sample')} are right.")]
    if len(found.classes) <= _CLASSES:
        parts.append(matrix(found))
    mistakes = [
        f"{count} x {_class_name(true)} as {_class_name(predicted)}"
        for (true, predicted), count in found.counts.most_common()
        if true != predicted
    ]
    if mistakes:
        parts.append(paragraph(f"Most often: {'; '.join(mistakes[:_MISTAKES])}."))
    return "".join(parts)


def matrix(found: Predictions) -> str:
    """Render the counts as an HTML table: a row per true class, a column per predicted one.

    A cell is bluer the larger its share of its row is, by the square root, so that single mistakes
    are visible.
    """
    classes, counts = found.classes, found.counts
    head = "".join(f"<th>{escape(_class_name(label))}</th>" for label in classes)
    rows = []
    for true in classes:
        total = sum(counts[true, other] for other in classes)
        cells = "".join(_cell(counts[true, other], total) for other in classes)
        rows.append(f"<tr><th>{escape(_class_name(true))}</th>{cells}</tr>")
    head = f"<thead><tr><th>true \\ predicted</th>{head}</tr></thead>"
    body = f"{head}<tbody>{''.join(rows)}</tbody>"
    return f'<table cellpadding="4" style="font-size:inherit">{body}</table>'


def _cell(count: int, total: int) -> str:
    if not count:
        return "<td></td>"
    share = _DARKEST * math.sqrt(count / total)
    blue = f"background-color: rgba({_BLUE}, {share:.2f})"
    return f'<td style="text-align: center; {blue}">{count}</td>'


def _class_name(value: object) -> str:
    return shortened(str(value), _NAME)


# --- page ---


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
        f'<h2 id="part{number}">{escape(section.title)}</h2>{view(*section.parts)}'
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
