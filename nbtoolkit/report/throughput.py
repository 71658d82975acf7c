"""Throughput: samples a second, and how much of the devices was used for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

from nbtoolkit.report.curves import thinned
from nbtoolkit.report.picture import Picture, legend_below, panels
from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Points, Story
from nbtoolkit.report.words import number
from nbtoolkit.search.labels import plain
from nbtoolkit.search.plots import COLOURS

_NEAR = 5  # values that one is smoothed by
_RATE, _MEMORY = "samples_per_second", "memory_gb_rank"


def throughput(stories: Sequence[Story]) -> Section:
    """A table of what was logged and read; the samples a second at each step of the newest runs."""
    section = Section("Throughput and device use")
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
        section.picture(_draw(rated, [labels[id(story)] for story in rated]))
    return section


def _draw(stories: Sequence[Story], labels: Sequence[str]) -> Picture:
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


def _rates(story: Story) -> Points:
    return [(step, values[_RATE]) for step, values in story.logged if _RATE in values]


def _smooth(points: Points) -> Points:
    """Each value as the median of those around it.

    A step or two of a small model take less time than can be measured well.
    """
    values = [value for _, value in points]
    half = _NEAR // 2
    near = (values[max(at - half, 0) : at + half + 1] for at in range(len(values)))
    return [(step, median(some)) for (step, _), some in zip(points, near, strict=True)]


def _rate(story: Story) -> str:
    rates = [rate for _, rate in _rates(story)]
    return f"{median(rates):,.0f}" if rates else ""


def _ranks_memory(story: Story) -> str:
    """The most that any rank used, in GB; logged by fit, else read by the owner."""
    logged = [v for _, values in story.logged for k, v in values.items() if k.startswith(_MEMORY)]
    read = [r["memory"] / 1e9 for r in story.readings if "rank" in r and "memory" in r]
    return number(max(logged or read, default=None))


def _mean(name: str, of: str) -> Callable[[Story], str]:
    """The mean of a reading, for each rank or GPU (``of``)."""

    def told(story: Story) -> str:
        by: dict[object, list[float]] = {}
        for reading in story.readings:
            if of in reading and isinstance(reading.get(name), (int, float)):
                by.setdefault(reading[of], []).append(reading[name])
        return ", ".join(number(fmean(by[one])) for one in sorted(by, key=str))

    return told


def _gpu_memory(story: Story) -> str:
    """The most that was used of any GPU, in GB; all processes of the machine together."""
    read = [r["memory_used"] / 1e9 for r in story.readings if "index" in r and "memory_used" in r]
    return number(max(read, default=None))


_COLUMNS: dict[str, Callable[[Story], str]] = {
    "samples a second (median)": _rate,
    "memory of a rank (GB, most)": _ranks_memory,
    "CPU cores of each rank (mean)": _mean("cpu", "rank"),
    "use of each GPU (%, mean)": _mean("utilization", "index"),
    "memory of a GPU (GB, most)": _gpu_memory,
}
