"""Differences: the settings in which runs differ, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Story
from nbtoolkit.report.words import setting
from nbtoolkit.runtime.paths import decides_result

_RUNS = 8  # columns
_ABSENT = object()


def differences(stories: Sequence[Story]) -> Section:
    """A row for each setting that is not the same in all runs, a column for each run.

    What decides about results comes first; where results are written, for example, does not.
    """
    section = Section("Differences of configurations")
    told = [story for story in stories if story.config][-_RUNS:]
    if len(told) < 2:
        return section.say("There are no two configurations to compare.")
    settings = [flat(story.config) for story in told]
    names = dict.fromkeys(name for one in settings for name in one)
    differing = [
        n
        for n in names
        if any(one.get(n, _ABSENT) != settings[0].get(n, _ABSENT) for one in settings)
    ]
    if not differing:
        return section.say(f"The {len(told)} configurations are equal.")
    differing.sort(key=lambda name: not decides_result(name, told[-1].config))
    header = ["setting", *(story.label for story in told)]
    section.table(header, [_row(name, settings) for name in differing])
    if len(told) < len(stories):
        section.say(f"The newest {len(told)} of {len(stories)} runs are compared.")
    return section


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _row(name: str, settings: Sequence[Mapping[str, Any]]) -> list[str]:
    values = (one.get(name, _ABSENT) for one in settings)
    return [name, *("" if value is _ABSENT else setting(value) for value in values)]
