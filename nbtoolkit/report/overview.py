"""Overview: all runs in one table: what they are, how they ended, what they scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nbtoolkit.report.section import Section
from nbtoolkit.report.story import Story
from nbtoolkit.report.words import counted, duration, moment, number
from nbtoolkit.search.labels import shortened

_METRICS = 5  # columns
_WORDS = {"run": "run", "sweep": "sweep", "cv": "cross-validation"}


def overview(stories: Sequence[Story]) -> Section:
    """The table of runs, the oldest first; below it what failed, and what cannot be read."""
    section = Section("Runs")
    if not stories:
        return section.say("There are no runs in this folder.")
    names = _metrics(stories)
    heads = [shortened(name, 28) for name in names]
    header = ["run", "what", "status", *heads, "took", "device", "began (UTC)"]
    section.table(header, [_row(story, names) for story in stories])
    for story in stories:
        for sentence in _troubles(story):
            section.say(f"{story.label}: {sentence}")
    return section


def _metrics(stories: Sequence[Story]) -> list[str]:
    """The metrics that most runs have; those of validation before others."""
    runs = Counter(name for story in stories for name in story.metrics)
    ranked = sorted(runs, key=lambda name: (not name.startswith("val_"), -runs[name]))
    return ranked[:_METRICS]


def _row(story: Story, names: Sequence[str]) -> list[str]:
    begun = f", in {counted(story.attempts, 'attempt')}" if story.attempts > 1 else ""
    return [
        story.label,
        _WORDS[story.kind],
        story.status,
        *(number(story.metrics.get(name)) for name in names),
        duration(story.seconds) + begun,
        shortened(story.device, 32),
        moment(story.began),
    ]


def _troubles(story: Story) -> list[str]:
    found = [f"{name} cannot be read" for name in story.damaged]
    if story.error:
        kind = str(story.error.get("type", "")).removeprefix("builtins.")
        text = f"{kind}: {story.error.get('text', '')}"
        found.append(f"failed: {shortened(text, 300)}")
    if story.status == "cut off":
        found.append("cut off: its process died; the same launch goes on with it")
    return found
