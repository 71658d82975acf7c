"""Write a report's sections: overview, pages, comparison, throughput and predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median

from nbtoolkit.config.schema import flat_settings
from nbtoolkit.report.predictions import NoPredictions, Predictions, joined, predictions_of
from nbtoolkit.run.paths import KIND_NAMES, RunPaths
from nbtoolkit.run.resume import decides_result
from nbtoolkit.text_table import counted, duration, metric_column, moment, shortened
from nbtoolkit.views.chart import PALETTE, RUNNING, Axis, Series, chart
from nbtoolkit.views.markup import alert, card, data_table, grid, paragraph, tiles, view
from nbtoolkit.views.page import page_html
from nbtoolkit.views.run_cards import metric_charts, run_lines
from nbtoolkit.views.state import State
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
        return view(*self.parts)

    def __repr__(self) -> str:
        return f"ReportSection({self.title!r}, {counted(len(self.parts), 'part')})"


# --- overview and pages ---

_METRICS = 5  # columns


def overview(runs: Sequence[State]) -> ReportSection:
    """Tabulate the runs, oldest first; below, what is wrong with those that did not complete."""
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
    return ReportSection("Runs", [data_table(header, [*zip(*columns, strict=True)]), *problems])


def label(run: State) -> str:
    """Return a run's name, short enough for a table's header or a legend."""
    return shortened(name_of(run), 28)


def _took(run: State) -> str:
    attempts = f", in {run.attempts} attempts" if run.attempts > 1 else ""
    return duration(run.elapsed()) + attempts


def page_section(run: State) -> ReportSection:
    """Write the page of a run, a sweep or a cross-validation, as the panel shows it."""
    return ReportSection(label(run), [page_html(run)])


# --- comparison ---


def comparison(runs: Sequence[State]) -> ReportSection:
    """Compare the newest single runs: learning curves, and the settings that differ."""
    single = [run for run in runs if run.kind == "run"]
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


# --- throughput ---


def throughput(runs: Sequence[State]) -> ReportSection:
    """Tabulate samples per second and device use of runs and folds."""
    cells = {label(run): _use(run) for run in runs}
    for run in runs:
        folds = run.fold_runs().items()
        cells |= {f"{label(run)}, fold {number}": _use(fold) for number, fold in folds}
    columns = dict.fromkeys(column for row in cells.values() for column in row)
    rows = [[n, *(row.get(column, "") for column in columns)] for n, row in cells.items() if row]
    parts = [data_table(["run", *columns], rows)] if rows else []
    return ReportSection("Throughput and device use", parts)


def _use(run: State) -> dict[str, str]:
    """The cells of a run, by column."""
    rates = [rate for _, rate in run.logged.get("samples_per_second", ())]
    cells = {"samples a second (median)": f"{median(rates):,.0f}"} if rates else {}
    return cells | {device.name: device.text for device in run.devices()}


# --- predictions ---

_RUNS = 4  # the newest that have predictions
_CLASSES = 20  # a larger matrix is unreadable; the most frequent mistakes are listed instead
_MISTAKES = 5
_NAME = 24  # characters of a class
_BLUE = "42, 127, 201"  # RUNNING; at most half of it, so that the page's text stays readable
_DARKEST = 0.5


def predictions(runs: Sequence[State]) -> ReportSection:
    """Show the newest runs' predictions; of a cross-validation, the out-of-fold predictions.

    For predictions that cannot be shown, the section states the reason.
    """
    cards: list[str] = []
    reasons: list[str] = []
    for run in reversed([run for run in runs if run.kind != "sweep"]):
        try:
            found = _predictions(run)
        except NoPredictions as reason:
            reasons.append(paragraph(f"{label(run)}: {reason}."))
            continue
        if found is not None and len(cards) < _RUNS:
            title = f"{label(run)}, {'out of fold' if run.kind == 'cv' else 'validation'}"
            cards.append(card(title, _drawn(found), span=2))
    return ReportSection("Predictions", ([grid(*cards)] if cards else []) + reasons)


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
