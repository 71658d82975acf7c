"""Write a report's sections: overview, pages, comparison, throughput and predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean, median

from nbtoolkit.config.schema import flat_settings
from nbtoolkit.report.predictions import NoPredictions, Predictions, joined, predictions_of
from nbtoolkit.report.reported_run import ReportedRun
from nbtoolkit.run.paths import KIND_NAMES, RunPaths
from nbtoolkit.run.resume import decides_result
from nbtoolkit.text_table import counted, duration, metric_column, moment, setting, shortened
from nbtoolkit.views.chart import PALETTE, RUNNING, Axis, Series, chart
from nbtoolkit.views.markup import alert, card, data_table, grid, paragraph, view
from nbtoolkit.views.page import page_html
from nbtoolkit.views.run_cards import quantity_axis
from nbtoolkit.views.text import curves_of, quantity_of, status_of


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


def overview(runs: Sequence[ReportedRun]) -> ReportSection:
    """Tabulate the runs, oldest first; below, why runs failed and which files cannot be read."""
    if not runs:
        return ReportSection("Runs", [paragraph("There are no runs in this folder.")])
    counts = Counter(name for run in runs for name in run.metrics)
    ranked = sorted(counts, key=lambda name: (not name.startswith("val_"), -counts[name]))
    metrics = ranked[:_METRICS]
    columns = [
        [run.label for run in runs],
        [KIND_NAMES[run.kind] for run in runs],
        [status_of(run) for run in runs],
        *(metric_column([run.metrics.get(name) for run in runs]) for name in metrics),
        [_took(run) for run in runs],
        [shortened(run.device, 32) for run in runs],
        [moment(run.first) for run in runs],
    ]
    names = [shortened(metric, 28) for metric in metrics]
    header = ["run", "what", "status", *names, "took", "device", "began (UTC)"]
    problems = [alert(f"{run.label}: {text}") for run in runs for text in _problems(run)]
    return ReportSection("Runs", [data_table(header, [*zip(*columns, strict=True)]), *problems])


def _took(run: ReportedRun) -> str:
    attempts = f", in {run.attempts} attempts" if run.attempts > 1 else ""
    return duration(run.elapsed()) + attempts


def _problems(run: ReportedRun) -> list[str]:
    problems = [f"{name} cannot be read" for name in run.damaged]
    if run.error:
        kind = str(run.error.get("type", "")).removeprefix("builtins.")
        problems.append(f"failed: {kind}: {shortened(str(run.error.get('text', '')), 300)}")
    elif run.status == "cut off":
        problems.append("interrupted: its process died; the same launch resumes it")
    return problems


def page_section(run: ReportedRun) -> ReportSection:
    """Write the page of a run, a sweep or a cross-validation, as the panel shows it."""
    return ReportSection(run.label, [page_html(run)])


# --- comparison ---

_ABSENT = object()


def comparison(runs: Sequence[ReportedRun]) -> ReportSection:
    """Compare the newest single runs: learning curves, and the settings that differ."""
    section = ReportSection("Comparison")
    single = [run for run in runs if run.kind == "run"]
    compared = single[-len(PALETTE) :]
    if len(compared) < 2:
        return section
    if len(compared) < len(single):
        section.parts.append(paragraph(f"The newest {len(compared)} of {len(single)} runs."))
    quantities = dict.fromkeys(quantity_of(name) for run in compared for name in curves_of(run))
    charts = [_curves(compared, name) for name in quantities]
    section.parts += [grid(*charts)] if charts else []
    return ReportSection(section.title, section.parts + _differences(compared))


def _curves(runs: Sequence[ReportedRun], quantity: str) -> str:
    lines = [
        Series(
            f"{run.label}, training" if name.startswith("train_") else run.label,
            points,
            "dashed" if name.startswith("train_") else "line",
            colour,
        )
        for run, colour in zip(runs, PALETTE, strict=False)
        for name, points in curves_of(run).items()
        if quantity_of(name) == quantity
    ]
    drawn = chart(
        lines, x=Axis("step", integer=True), y=quantity_axis(quantity, lines), legend=True
    )
    return card(shortened(quantity, 32), drawn, span=2)


def _differences(runs: Sequence[ReportedRun]) -> list[str]:
    """Tabulate the settings that are not equal; those that change a run's results come first."""
    configs = [flat_settings(run.config) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name, _ABSENT) for config in configs] for name in names}
    differing = [name for name in names if any(v != values[name][0] for v in values[name])]
    if not differing:
        return [paragraph("The settings of all these runs are equal.")]
    differing.sort(key=lambda name: not decides_result(name, runs[-1].config))
    rows = [
        [name, *("" if value is _ABSENT else setting(value) for value in values[name])]
        for name in differing
    ]
    return [data_table(["setting", *(run.label for run in runs)], rows)]


# --- throughput ---


_READINGS: tuple[tuple[str, str, str, float, Callable[[list[float]], float]], ...] = (
    ("CPU cores of each rank (mean)", "rank", "cpu", 1.0, fmean),
    ("memory of each rank (GB, most)", "rank", "memory", 1e-9, max),
    ("use of each GPU (%, mean)", "index", "utilization", 1.0, fmean),
    ("memory of each GPU (GB, most)", "index", "memory_used", 1e-9, max),
)
"""Column; what was read: a rank or a GPU; the reading's name, its factor, and its summary."""


def throughput(runs: Sequence[ReportedRun]) -> ReportSection:
    """Tabulate samples per second and device use of runs and folds."""
    cells = {
        run.label if part is run else f"{run.label}, {part.label}": _use(part)
        for run in runs
        for part in (run, *run.fold_runs)
    }
    columns = dict.fromkeys(column for row in cells.values() for column in row)
    rows = [[n, *(row.get(column, "") for column in columns)] for n, row in cells.items() if row]
    parts = [data_table(["run", *columns], rows)] if rows else []
    return ReportSection("Throughput and device use", parts)


def _use(run: ReportedRun) -> dict[str, str]:
    """The cells of a run, by column; columns without a value are left out."""
    rates = [rate for _, rate in run.logged.get("samples_per_second", ())]
    cells = {"samples a second (median)": f"{median(rates):,.0f}"} if rates else {}
    for column, device, name, factor, summary in _READINGS:
        values: dict[str, list[float]] = {}
        for reading in run.samples:
            if device in reading and isinstance(value := reading.get(name), (int, float)):
                values.setdefault(str(reading[device]), []).append(value * factor)
        if values:
            cells[column] = ", ".join(f"{summary(values[key]):.4g}" for key in sorted(values))
    return cells


# --- predictions ---

_RUNS = 4  # the newest that have predictions
_CLASSES = 20  # a larger matrix is unreadable; the most frequent mistakes are listed instead
_MISTAKES = 5
_NAME = 24  # characters of a class
_BLUE = "42, 127, 201"  # RUNNING; at most half of it, so that the page's text stays readable
_DARKEST = 0.5


def predictions(runs: Sequence[ReportedRun]) -> ReportSection:
    """Show the newest runs' predictions; of a cross-validation, the out-of-fold predictions.

    For predictions that cannot be shown, the section states the reason.
    """
    cards: list[str] = []
    reasons: list[str] = []
    for run in reversed([run for run in runs if run.kind != "sweep"]):
        try:
            found = _predictions(run)
        except NoPredictions as reason:
            reasons.append(paragraph(f"{run.label}: {reason}."))
            continue
        if found is not None and len(cards) < _RUNS:
            title = f"{run.label}, {'out of fold' if run.kind == 'cv' else 'validation'}"
            cards.append(card(title, _drawn(found), span=2))
    return ReportSection("Predictions", ([grid(*cards)] if cards else []) + reasons)


def _predictions(run: ReportedRun) -> Predictions | None:
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
