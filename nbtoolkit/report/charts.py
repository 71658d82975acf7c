"""Draw a report's learning curves, throughput and confusion matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import islice
from statistics import fmean, median

from nbtoolkit.report.predictions import NoPredictions, Predictions, joined, predictions_of
from nbtoolkit.report.run_summary import Points, RunSummary, thinned
from nbtoolkit.report.section import Picture, ReportSection, legend_below, panels
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.study.plots import COLOURS, plain
from nbtoolkit.text_table import counted, number, shortened

# --- learning curves ---

_PANELS = 6
_LOG_RATIO = 20.0  # largest to smallest loss, above which the scale is logarithmic


def curves(runs: Sequence[RunSummary]) -> ReportSection:
    """Draw the learning curves of the newest runs."""
    section = add_curves(ReportSection("Learning curves"), runs)
    with_folds = [run.label for run in runs if any(map(_lines, run.folds))]
    if with_folds:
        section.paragraph(
            f"The curves of each fold of {', '.join(with_folds)} are in Cross-validations."
        )
    if not section.parts:
        section.paragraph("No run outside of a sweep has reported or logged a metric twice.")
    return section


def add_curves(section: ReportSection, runs: Sequence[RunSummary]) -> ReportSection:
    """Add the learning curves of runs to a section, at most one run for each colour.

    Training and validation of one metric share a panel.

    Args:
        section: gets the chart, and sentences on what is left out; nothing without any curve.
        runs: oldest first.
    """
    runs = [run for run in runs if _lines(run)]
    if not runs:
        return section
    shown = runs[-len(COLOURS) :]
    groups = dict.fromkeys(group(metric) for run in shown for metric in _lines(run))
    names = sorted(groups, key=lambda name: name != "loss")  # the loss first
    section.picture(_draw_curves(shown, names[:_PANELS]))
    if len(runs) > len(shown):
        section.paragraph(f"The newest {len(shown)} of {len(runs)} runs are drawn.")
    if len(names) > _PANELS:
        omitted = ", ".join(names[_PANELS:])
        section.paragraph(f"Not drawn: {counted(len(names) - _PANELS, 'metric')}: {omitted}.")
    return section


def group(metric: str) -> str:
    """Return the panel of a metric: ``"train_loss"`` and ``"val_loss"`` share ``"loss"``."""
    return metric.removeprefix("train_").removeprefix("val_")


def _draw_curves(runs: Sequence[RunSummary], names: Sequence[str]) -> Picture:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    figure, axes = panels(len(names))
    for name, panel in zip(names, axes, strict=True):
        finite: list[float] = []
        for run, colour in zip(runs, COLOURS, strict=False):
            for metric, points in _lines(run).items():
                if group(metric) == name:
                    steps, values = zip(*thinned(points), strict=True)
                    panel.plot(steps, values, _style(metric), color=colour, linewidth=1.6)
                    finite += filter(math.isfinite, values)
        panel.set(title=plain(name, 32), xlabel="step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name.endswith("loss") and finite and 0 < min(finite) * _LOG_RATIO < max(finite):
            panel.set_yscale("log")
    keys = [Line2D([], [], color=colour) for _, colour in zip(runs, COLOURS, strict=False)]
    labels = [plain(run.label) for run in runs]
    if len({_style(metric) for run in runs for metric in _lines(run)}) > 1:
        keys += [Line2D([], [], color="#777", linestyle=style) for style in ("--", "-")]
        labels += ["training", "validation"]
    legend_below(figure, keys, labels)
    return Picture(figure, f"learning curves of {', '.join(run.label for run in runs)}")


def _style(metric: str) -> str:
    return "--" if metric.startswith("train_") else "-"


def _lines(run: RunSummary) -> dict[str, Points]:
    """Return the curves of at least two points."""
    return {name: points for name, points in run.curves.items() if len(points) > 1}


# --- throughput ---

_SMOOTHED = 5  # values whose median is drawn


def throughput(runs: Sequence[RunSummary]) -> ReportSection:
    """Tabulate samples per second and device use; draw the former for the newest runs."""
    section = ReportSection("Throughput and device use")
    labelled = [
        (run.label if part is run else f"{run.label}, {part.label}", part)
        for run in runs
        for part in (run, *run.folds)
        if part.logged or part.readings
    ]
    if not labelled:
        return section.paragraph("No run has logged anything or run for 5 s, until a reading.")
    cells = {name: [text(run) for _, run in labelled] for name, text in _COLUMNS.items()}
    cells = {name: column for name, column in cells.items() if any(column)}
    rows = zip([label for label, _ in labelled], *cells.values(), strict=True)
    section.table(["run", *cells], [list(row) for row in rows])
    rated = [(label, run) for label, run in labelled if len(_rates(run)) > 1][-len(COLOURS) :]
    if rated:
        section.picture(_draw_throughput(rated))
    return section


def _draw_throughput(labelled: Sequence[tuple[str, RunSummary]]) -> Picture:
    figure, [panel] = panels(1)
    figure.set_figwidth(2 * figure.get_figwidth())
    handles = []
    for (_, run), colour in zip(labelled, COLOURS, strict=False):
        steps, rates = zip(*thinned(_smooth(_rates(run))), strict=True)
        handles += panel.plot(steps, rates, color=colour, linewidth=1.4)
    panel.set(xlabel="step", ylabel=f"samples a second\n(median of {_SMOOTHED})")
    panel.set_ylim(bottom=0)
    labels = [label for label, _ in labelled]
    legend_below(figure, handles, [plain(label) for label in labels])
    return Picture(figure, f"samples a second of {', '.join(labels)}")


def _rates(run: RunSummary) -> Points:
    name = "samples_per_second"
    return [(step, values[name]) for step, values in run.logged if name in values]


def _smooth(points: Points) -> Points:
    """Replace each value by the median of those around it.

    One or two steps of a small model are too short to be measured well.
    """
    values = [value for _, value in points]
    half = _SMOOTHED // 2
    return [
        (step, median(values[max(index - half, 0) : index + half + 1]))
        for index, (step, _) in enumerate(points)
    ]


def _median_rate(run: RunSummary) -> str:
    rates = [rate for _, rate in _rates(run)]
    return f"{median(rates):,.0f}" if rates else ""


def _rank_memory(run: RunSummary) -> str:
    """Return the most memory that a rank used, in GB: logged by fit, else read."""
    logged = [
        value
        for _, values in run.logged
        for name, value in values.items()
        if name.startswith("memory_gb_rank")
    ]
    read = [float(r["memory"]) / 1e9 for r in run.readings if "rank" in r and "memory" in r]
    return number(max(logged or read, default=None))


def _gpu_memory(run: RunSummary) -> str:
    """Return the most memory in use on a GPU, in GB, by all processes of the machine."""
    read = [
        float(r["memory_used"]) / 1e9 for r in run.readings if "index" in r and "memory_used" in r
    ]
    return number(max(read, default=None))


def _means(run: RunSummary, name: str, device: str) -> str:
    """Return the mean of a reading, for each ``"rank"`` or GPU (``"index"``)."""
    values: dict[object, list[float]] = {}
    for reading in run.readings:
        if device in reading and isinstance(value := reading.get(name), (int, float)):
            values.setdefault(reading[device], []).append(value)
    return ", ".join(number(fmean(values[key])) for key in sorted(values, key=str))


_COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "samples a second (median)": _median_rate,
    "memory of a rank (GB, most)": _rank_memory,
    "CPU cores of each rank (mean)": lambda run: _means(run, "cpu", "rank"),
    "use of each GPU (%, mean)": lambda run: _means(run, "utilization", "index"),
    "memory of a GPU (GB, most)": _gpu_memory,
}

# --- predictions ---

_RUNS = 4  # the newest that have predictions
_CLASSES = 20  # a larger matrix is unreadable; the most frequent mistakes are listed instead
_MISTAKES = 5
_NAME = 24  # characters of a class
_BLUE = "42, 127, 201"  # COLOURS[0]; at most half of it, so that the page's text stays readable
_DARKEST = 0.5


def confusion(runs: Sequence[RunSummary]) -> ReportSection:
    """Show the newest runs' predictions; of a cross-validation, the out-of-fold predictions.

    For a run without predictions, the section states the reason.
    """
    section = ReportSection("Predictions")
    shown = 0
    for run in reversed([run for run in runs if run.kind != "sweep"]):
        if shown == _RUNS:
            section.paragraph(f"Only the newest {_RUNS} runs that have predictions are shown.")
            break
        try:
            predictions = _predictions(run)
        except NoPredictions as reason:
            section.paragraph(f"{run.label}: {reason}.")
            continue
        shown += 1
        _add_predictions(section, run, predictions)
    return (
        section
        if section.parts
        else section.paragraph("There is no run that could have predictions.")
    )


def _predictions(run: RunSummary) -> Predictions:
    if run.kind == "run":
        return predictions_of(run.paths)
    files = sorted(run.paths.folder.glob("folds/*/values/0.pkl"))
    if not files:
        raise NoPredictions("no fold has ended")
    return joined(predictions_of(RunPaths(file.parents[1])) for file in files)


def _add_predictions(section: ReportSection, run: RunSummary, predictions: Predictions) -> None:
    section.heading(f"{run.label}, {'out of fold' if run.kind == 'cv' else 'validation'}")
    if not predictions.are_classes:
        section.picture(_scatter(run, predictions))
        return
    samples = counted(len(predictions.true), "sample")
    section.paragraph(f"{predictions.accuracy:.4f} of {samples} are right.")
    if len(predictions.classes) <= _CLASSES:
        section.html(matrix(predictions))
    if mistakes := _mistakes(predictions):
        section.paragraph(f"Most often: {'; '.join(mistakes)}.")


def matrix(predictions: Predictions) -> str:
    """Render the counts as an HTML table: a row per true class, a column per predicted one.

    A cell is bluer the larger its share of its row is, by the square root, so that single mistakes
    are visible.
    """
    classes, counts = predictions.classes, predictions.counts
    head = "".join(f"<th>{escape(_class_name(label))}</th>" for label in classes)
    rows = []
    for true in classes:
        total = sum(counts[true, other] for other in classes)
        cells = "".join(_cell(counts[true, other], total) for other in classes)
        rows.append(f"<tr><th>{escape(_class_name(true))}</th>{cells}</tr>")
    corner = "<th>true \\ predicted</th>"
    return f"<table><thead><tr>{corner}{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(count: int, total: int) -> str:
    if not count:
        return '<td style="text-align: center"></td>'
    share = _DARKEST * math.sqrt(count / total)
    blue = f"background-color: rgba({_BLUE}, {share:.2f})"
    return f'<td style="text-align: center; {blue}">{count}</td>'


def _class_name(value: object) -> str:
    return shortened(str(value), _NAME)


def _mistakes(predictions: Predictions) -> list[str]:
    """Return the most frequent mistakes, in words."""
    mistakes = (
        f"{count} x {_class_name(true)} as {_class_name(predicted)}"
        for (true, predicted), count in predictions.counts.most_common()
        if true != predicted
    )
    return list(islice(mistakes, _MISTAKES))


def _scatter(run: RunSummary, predictions: Predictions) -> Picture:
    figure, [panel] = panels(1)
    true, predicted = predictions.true, predictions.predicted
    panel.scatter(true, predicted, s=12, color=COLOURS[0], alpha=0.7, linewidths=0)
    ends = [min(*true, *predicted), max(*true, *predicted)]
    panel.plot(ends, ends, color="#777", linewidth=1, linestyle=":")
    panel.set(xlabel="true", ylabel="predicted")
    return Picture(figure, f"predicted by true values of {run.label}")
