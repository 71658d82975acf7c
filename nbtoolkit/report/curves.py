"""Curves: the metrics of each epoch; training and validation of one kind share a panel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nbtoolkit.report.picture import Picture, legend_below, panels
from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Points, Story
from nbtoolkit.report.words import counted
from nbtoolkit.search.labels import plain
from nbtoolkit.search.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = 6
_STYLES = {"train_": "--", "val_": "-"}
_POINTS = 1000  # of a line: more cannot be seen, and make the page slow
_RATIO = 20.0  # largest to smallest loss, from which on the scale is logarithmic


def curves(stories: Sequence[Story]) -> Section:
    """The learning curves of the newest runs."""
    section = add_curves(Section("Learning curves"), stories)
    inside = [story.label for story in stories if any(map(_lines, story.folds))]
    if inside:
        section.say(f"Those of each fold of {', '.join(inside)} are under Cross-validations.")
    if not section.parts:
        section.say("No run outside of a sweep has reported or logged a metric twice.")
    return section


def add_curves(section: Section, stories: Sequence[Story]) -> Section:
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
    section.picture(_draw(shown, names[:_PANELS]))
    if len(stories) > len(shown):
        section.say(f"The newest {len(shown)} of {len(stories)} runs are drawn.")
    if len(names) > _PANELS:
        left = ", ".join(names[_PANELS:])
        section.say(f"Not drawn: {counted(len(names) - _PANELS, 'metric')}: {left}.")
    return section


def group(name: str) -> str:
    """The panel of a metric: ``"train_loss"`` and ``"val_loss"`` share ``"loss"``."""
    return name.removeprefix("train_").removeprefix("val_")


def _draw(stories: Sequence[Story], names: Sequence[str]) -> Picture:
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


def _lines(story: Story) -> dict[str, Points]:
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
