"""Folds: the scores of every cross-validation, fold by fold, and the folds' learning curves."""

from __future__ import annotations

from collections.abc import Sequence

from nbtoolkit.report.curves import add_curves
from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Story
from nbtoolkit.search.fold_table import FoldTable

_SHOWN = 3  # the newest cross-validations


def folds(stories: Sequence[Story]) -> Section:
    """A table of scores for each of the newest cross-validations."""
    section = Section("Cross-validations")
    found = [story for story in stories if story.kind == "cv"]
    for story in reversed(found[-_SHOWN:]):
        table = FoldTable(name=story.label, folds=_count(story))
        table.read(story.events)
        section.head(story.label).html(table.html())
        add_curves(section, story.folds)
    if len(found) > _SHOWN:
        section.say(f"The newest {_SHOWN} of {len(found)} cross-validations are shown.")
    return section if found else section.say("There is no cross-validation in this folder.")


def _count(story: Story) -> int | None:
    """How many folds there are; None: not known before it has ended."""
    count = (story.result.get("summary") or {}).get("folds")
    return count if isinstance(count, int) else None
