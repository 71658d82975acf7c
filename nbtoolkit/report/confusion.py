"""Confusion: which class was taken for which; of quantities, the predicted by the true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from nbtoolkit.report.picture import Picture, panels
from nbtoolkit.report.predictions import Class, NoPredictions, Predictions, joined, predictions_of
from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Story
from nbtoolkit.report.words import counted
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.search.labels import shortened
from nbtoolkit.search.plots import COLOURS

_RUNS = 4  # the newest that have predictions
_CLASSES = 20  # beyond that a matrix cannot be read; the most frequent mistakes are listed
_MISTAKES = 5
_BLUE = "42, 127, 201"  # COLOURS[0]; at most half of it, so that the page's text is read on it
_DARKEST = 0.5


def confusion(stories: Sequence[Story]) -> Section:
    """What the newest runs predicted; of a cross-validation the out-of-fold predictions.

    A run without any is named, with the reason.
    """
    section = Section("Predictions")
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


def _of(story: Story) -> Predictions:
    if story.kind == "run":
        return predictions_of(story.paths)
    folds = sorted(story.paths.folder.glob("folds/*/values/0.pkl"))
    if not folds:
        raise NoPredictions("no fold has ended")
    return joined(predictions_of(RunPaths(file.parents[1])) for file in folds)


def _add(section: Section, story: Story, found: Predictions) -> None:
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


def _scatter(story: Story, found: Predictions) -> Picture:
    figure, [panel] = panels(1)
    panel.scatter(found.true, found.predicted, s=12, color=COLOURS[0], alpha=0.7, linewidths=0)
    ends = [min(*found.true, *found.predicted), max(*found.true, *found.predicted)]
    panel.plot(ends, ends, color="#777", linewidth=1, linestyle=":")
    panel.set(xlabel="true", ylabel="predicted")
    return Picture(figure, f"predicted by true values of {story.label}")
