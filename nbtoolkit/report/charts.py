"""Draw a report's learning curves, throughput and confusion matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from statistics import fmean, median
from typing import TYPE_CHECKING

from nbtoolkit.report.predictions import Class, NoPredictions, Predictions, joined, predictions_of
from nbtoolkit.report.run_summary import Points, RunSummary, counted, number
from nbtoolkit.report.section import Picture, ReportSection, legend_below, panels
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.study.plots import COLOURS, plain, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- curves ---
# The metrics of each epoch; training and validation of one kind share a panel.


_PANELS = 6
_STYLES = {"train_": "--", "val_": "-"}
_POINTS = 1000  # of a line: more cannot be seen, and make the page slow
_RATIO = 20.0  # largest to smallest loss, from which on the scale is logarithmic


def curves(stories: Sequence[RunSummary]) -> ReportSection:
    """The learning curves of the newest runs."""
    section = add_curves(ReportSection("Learning curves"), stories)
    inside = [story.label for story in stories if any(map(_lines, story.folds))]
    if inside:
        section.say(f"Those of each fold of {', '.join(inside)} are under Cross-validations.")
    if not section.parts:
        section.say("No run outside of a sweep has reported or logged a metric twice.")
    return section


def add_curves(section: ReportSection, stories: Sequence[RunSummary]) -> ReportSection:
    """Draw the curves of these runs, at most one for each colour, into a section.

    Args:
        section: gets the picture, and sentences on what is left out; nothing without any curve.
        stories: runs, oldest first.
    """
    stories = [story for story in stories if _lines(story)]
    if not stories:
        return section
    shown = stories[-len(COLOURS) :]
    groups = dict.fromkeys(group(name) for story in shown for name in _lines(story))
    names = sorted(groups, key=lambda name: name != "loss")  # the loss first, else as they came
    section.picture(_draw_curves(shown, names[:_PANELS]))
    if len(stories) > len(shown):
        section.say(f"The newest {len(shown)} of {len(stories)} runs are drawn.")
    if len(names) > _PANELS:
        left = ", ".join(names[_PANELS:])
        section.say(f"Not drawn: {counted(len(names) - _PANELS, 'metric')}: {left}.")
    return section


def group(name: str) -> str:
    """The panel of a metric: ``"train_loss"`` and ``"val_loss"`` share ``"loss"``."""
    return name.removeprefix("train_").removeprefix("val_")


def _draw_curves(stories: Sequence[RunSummary], names: Sequence[str]) -> Picture:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    figure, axes = panels(len(names))
    for name, panel in zip(names, axes, strict=True):
        panel.set(title=plain(name, 32), xlabel="step")
        for story, colour in zip(stories, COLOURS, strict=False):
            for metric, points in _lines(story).items():
                if group(metric) == name:
                    panel.plot(*thinned(points), style(metric), color=colour, linewidth=1.6)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        _scale(panel, name)
    keys = [Line2D([], [], color=colour) for _, colour in zip(stories, COLOURS, strict=False)]
    labels = [plain(story.label) for story in stories]
    drawn = {style(metric) for story in stories for metric in _lines(story)}
    if len(drawn) > 1:
        keys += [Line2D([], [], color="#777", linestyle=one) for one in ("--", "-")]
        labels += ["training", "validation"]
    legend_below(figure, keys, labels)
    return Picture(figure, f"learning curves of {', '.join(story.label for story in stories)}")


def style(metric: str) -> str:
    """How a metric's line is drawn: training dashed."""
    return next((line for start, line in _STYLES.items() if metric.startswith(start)), "-")


def thinned(points: Points) -> tuple[list[float], list[float]]:
    """Steps and values of a line, evenly thinned where there are very many; its end stays."""
    every = -(-len(points) // _POINTS)
    kept = points[:: -every or -1][::-1]
    return [step for step, _ in kept], [value for _, value in kept]


def _lines(story: RunSummary) -> dict[str, Points]:
    return {name: points for name, points in story.curves.items() if _line(points)}


def _line(points: Points) -> bool:
    """Whether there is anything to draw a line through."""
    return len(points) > 1


def _scale(panel: Axes, name: str) -> None:
    values = [value for line in panel.lines for value in _finite(line.get_ydata())]
    if name.endswith("loss") and values and 0 < min(values) * _RATIO < max(values):
        panel.set_yscale("log")


def _finite(values: object) -> Iterable[float]:
    import numpy as np

    array = np.asarray(values, dtype=float)
    found: list[float] = array[np.isfinite(array)].tolist()
    return found


# --- throughput ---
# Samples a second, and how much of the devices was used for that.


_NEAR = 5  # values that one is smoothed by
_RATE, _MEMORY = "samples_per_second", "memory_gb_rank"


def throughput(stories: Sequence[RunSummary]) -> ReportSection:
    """A table of what was logged and read; the samples a second at each step of the newest runs."""
    section = ReportSection("Throughput and device use")
    named = [
        (story.label if one is story else f"{story.label}, {one.label}", one)
        for story in stories
        for one in (story, *story.folds)
    ]
    labels = {id(one): label for label, one in named}
    told = [one for _, one in named if one.logged or one.readings]
    if not told:
        return section.say("No run has logged anything or run long enough to be looked at (5 s).")
    columns = {name: [of(story) for story in told] for name, of in _COLUMNS.items()}
    kept = {name: values for name, values in columns.items() if any(values)}
    rows = zip(*([labels[id(story)] for story in told], *kept.values()), strict=True)
    section.table(["run", *kept], [list(row) for row in rows])
    rated = [story for story in told if len(_rates(story)) > 1][-len(COLOURS) :]
    if rated:
        section.picture(_draw_throughput(rated, [labels[id(story)] for story in rated]))
    return section


def _draw_throughput(stories: Sequence[RunSummary], labels: Sequence[str]) -> Picture:
    figure, [panel] = panels(1)
    figure.set_figwidth(2 * figure.get_figwidth())
    handles = []
    for story, colour in zip(stories, COLOURS, strict=False):
        rates = thinned(_smooth(_rates(story)))
        handles += panel.plot(*rates, color=colour, linewidth=1.4)
    panel.set(xlabel="step", ylabel=f"samples a second\n(median of {_NEAR})")
    panel.set_ylim(bottom=0)
    legend_below(figure, handles, [plain(label) for label in labels])
    return Picture(figure, f"samples a second of {', '.join(labels)}")


def _rates(story: RunSummary) -> Points:
    return [(step, values[_RATE]) for step, values in story.logged if _RATE in values]


def _smooth(points: Points) -> Points:
    """Each value as the median of those around it.

    A step or two of a small model take less time than can be measured well.
    """
    values = [value for _, value in points]
    half = _NEAR // 2
    near = (values[max(at - half, 0) : at + half + 1] for at in range(len(values)))
    return [(step, median(some)) for (step, _), some in zip(points, near, strict=True)]


def _rate(story: RunSummary) -> str:
    rates = [rate for _, rate in _rates(story)]
    return f"{median(rates):,.0f}" if rates else ""


def _ranks_memory(story: RunSummary) -> str:
    """The most that any rank used, in GB; logged by fit, else read by the supervisor."""
    logged = [v for _, values in story.logged for k, v in values.items() if k.startswith(_MEMORY)]
    read = [float(r["memory"]) / 1e9 for r in story.readings if "rank" in r and "memory" in r]
    return number(max(logged or read, default=None))


def _mean(name: str, of: str) -> Callable[[RunSummary], str]:
    """The mean of a reading, for each rank or GPU (``of``)."""

    def told(story: RunSummary) -> str:
        by: dict[object, list[float]] = {}
        for reading in story.readings:
            if of in reading and isinstance(value := reading.get(name), (int, float)):
                by.setdefault(reading[of], []).append(value)
        return ", ".join(number(fmean(by[one])) for one in sorted(by, key=str))

    return told


def _gpu_memory(story: RunSummary) -> str:
    """The most that was used of any GPU, in GB; all processes of the machine together."""
    read = [
        float(r["memory_used"]) / 1e9
        for r in story.readings
        if {"index", "memory_used"} <= r.keys()
    ]
    return number(max(read, default=None))


_COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "samples a second (median)": _rate,
    "memory of a rank (GB, most)": _ranks_memory,
    "CPU cores of each rank (mean)": _mean("cpu", "rank"),
    "use of each GPU (%, mean)": _mean("utilization", "index"),
    "memory of a GPU (GB, most)": _gpu_memory,
}

# --- confusion ---


_RUNS = 4  # the newest that have predictions
_CLASSES = 20  # beyond that a matrix cannot be read; the most frequent mistakes are listed
_MISTAKES = 5
_BLUE = "42, 127, 201"  # COLOURS[0]; at most half of it, so that the page's text is read on it
_DARKEST = 0.5


def confusion(stories: Sequence[RunSummary]) -> ReportSection:
    """What the newest runs predicted; of a cross-validation the out-of-fold predictions.

    A run without any is named, with the reason.
    """
    section = ReportSection("Predictions")
    shown = 0
    for story in reversed([one for one in stories if one.kind != "sweep"]):
        if shown == _RUNS:
            section.say(f"Only the newest {_RUNS} runs that have predictions are shown.")
            break
        try:
            found = _of(story)
        except NoPredictions as reason:
            section.say(f"{story.label}: {reason}.")
            continue
        shown += 1
        _add(section, story, found)
    return section if section.parts else section.say("There is no run that could have predictions.")


def _of(story: RunSummary) -> Predictions:
    if story.kind == "run":
        return predictions_of(story.paths)
    folds = sorted(story.paths.folder.glob("folds/*/values/0.pkl"))
    if not folds:
        raise NoPredictions("no fold has ended")
    return joined(predictions_of(RunPaths(file.parents[1])) for file in folds)


def _add(section: ReportSection, story: RunSummary, found: Predictions) -> None:
    what = "out of fold" if story.kind == "cv" else "validation"
    section.head(f"{story.label}, {what}")
    if not found.are_classes:
        section.picture(_scatter(story, found))
        return
    section.say(f"{found.accuracy:.4f} of {counted(len(found.true), 'sample')} are right.")
    if len(found.classes) <= _CLASSES:
        section.html(matrix(found))
    if mistakes := _mistakes(found):
        section.say(f"Most often: {'; '.join(mistakes)}.")


def matrix(found: Predictions) -> str:
    """The counts as a table in HTML: a row for each true class, a column for each predicted one.

    A cell is the bluer the larger its share of its row, by the square root, so that single mistakes
    are seen.
    """
    classes, counts = found.classes, found.counts
    head = "".join(f"<th>{_named(one)}</th>" for one in classes)
    rows = []
    for true in classes:
        total = sum(counts[true, other] for other in classes)
        cells = "".join(_cell(counts[true, other], total) for other in classes)
        rows.append(f"<tr><th>{_named(true)}</th>{cells}</tr>")
    corner = "<th>true \\ predicted</th>"
    return f"<table><thead><tr>{corner}{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(count: int, total: int) -> str:
    if not count:
        return '<td style="text-align: center"></td>'
    share = _DARKEST * math.sqrt(count / total)
    blue = f"background-color: rgba({_BLUE}, {share:.2f})"
    return f'<td style="text-align: center; {blue}">{count}</td>'


def _named(one: Class) -> str:
    return escape(shortened(str(one), 24))


def _mistakes(found: Predictions) -> Iterator[str] | list[str]:
    wrong = ((pair, n) for pair, n in found.counts.most_common() if pair[0] != pair[1])
    named = (f"{n} x {shortened(str(a), 24)} as {shortened(str(b), 24)}" for (a, b), n in wrong)
    return [text for text, _ in zip(named, range(_MISTAKES), strict=False)]


def _scatter(story: RunSummary, found: Predictions) -> Picture:
    figure, [panel] = panels(1)
    panel.scatter(found.true, found.predicted, s=12, color=COLOURS[0], alpha=0.7, linewidths=0)
    ends = [min(*found.true, *found.predicted), max(*found.true, *found.predicted)]
    panel.plot(ends, ends, color="#777", linewidth=1, linestyle=":")
    panel.set(xlabel="true", ylabel="predicted")
    return Picture(figure, f"predicted by true values of {story.label}")
