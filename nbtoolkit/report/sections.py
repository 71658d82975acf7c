"""Write a report's overview, differing settings, folds and sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nbtoolkit.crossval.cv_result import FoldTable
from nbtoolkit.errors import RunFileError, SweepError
from nbtoolkit.report.charts import add_curves
from nbtoolkit.report.run_summary import RunSummary, counted, duration, moment, number, setting
from nbtoolkit.report.section import Picture, ReportSection
from nbtoolkit.run.resume import decides_result
from nbtoolkit.search.sweep_result import STUDY_FILE, read_sweep_config
from nbtoolkit.study.plots import plot_history, plot_importances, plot_slices, shortened
from nbtoolkit.study.sweep_config import SweepConfig
from nbtoolkit.study.table import SweepTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study


# --- overview ---
# All runs in one table: what they are, how they ended, what they scored.


_METRICS = 5  # columns
_WORDS = {"run": "run", "sweep": "sweep", "cv": "cross-validation"}


def overview(stories: Sequence[RunSummary]) -> ReportSection:
    """The table of runs, the oldest first; below it what failed, and what cannot be read."""
    section = ReportSection("Runs")
    if not stories:
        return section.say("There are no runs in this folder.")
    names = _metrics(stories)
    heads = [shortened(name, 28) for name in names]
    header = ["run", "what", "status", *heads, "took", "device", "began (UTC)"]
    section.table(header, [_overview_row(story, names) for story in stories])
    for story in stories:
        for sentence in _troubles(story):
            section.say(f"{story.label}: {sentence}")
    return section


def _metrics(stories: Sequence[RunSummary]) -> list[str]:
    """The metrics that most runs have; those of validation before others."""
    runs = Counter(name for story in stories for name in story.metrics)
    ranked = sorted(runs, key=lambda name: (not name.startswith("val_"), -runs[name]))
    return ranked[:_METRICS]


def _overview_row(story: RunSummary, names: Sequence[str]) -> list[str]:
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


def _troubles(story: RunSummary) -> list[str]:
    found = [f"{name} cannot be read" for name in story.damaged]
    if story.error:
        kind = str(story.error.get("type", "")).removeprefix("builtins.")
        text = f"{kind}: {story.error.get('text', '')}"
        found.append(f"failed: {shortened(text, 300)}")
    if story.status == "cut off":
        found.append("cut off: its process died; the same launch goes on with it")
    return found


# --- differences ---
# The settings in which runs differ, side by side.


_RUNS = 8  # columns
_ABSENT = object()


def differences(stories: Sequence[RunSummary]) -> ReportSection:
    """A row for each setting that is not the same in all runs, a column for each run.

    What decides about results comes first; where results are written, for example, does not.
    """
    section = ReportSection("Differences of configurations")
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
    section.table(header, [_difference_row(name, settings) for name in differing])
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


def _difference_row(name: str, settings: Sequence[Mapping[str, Any]]) -> list[str]:
    values = (one.get(name, _ABSENT) for one in settings)
    return [name, *("" if value is _ABSENT else setting(value) for value in values)]


# --- folds ---
# The scores of every cross-validation, fold by fold, and the folds' learning curves.


_SHOWN = 3  # the newest cross-validations


def folds(stories: Sequence[RunSummary]) -> ReportSection:
    """A table of scores for each of the newest cross-validations."""
    section = ReportSection("Cross-validations")
    found = [story for story in stories if story.kind == "cv"]
    for story in reversed(found[-_SHOWN:]):
        table = FoldTable(name=story.label, folds=_count(story))
        table.read(story.events)
        section.head(story.label).html(table.html())
        add_curves(section, story.folds)
    if len(found) > _SHOWN:
        section.say(f"The newest {_SHOWN} of {len(found)} cross-validations are shown.")
    return section if found else section.say("There is no cross-validation in this folder.")


def _count(story: RunSummary) -> int | None:
    """How many folds there are; None: not known before it has ended."""
    count = (story.result.get("summary") or {}).get("folds")
    return count if isinstance(count, int) else None


# --- sweeps ---


_SWEEPS = 3  # the newest
_PLOTS: dict[str, Callable[..., Figure]] = {
    "history": plot_history,
    "importances": plot_importances,
    "slices": plot_slices,
}


def sweeps(stories: Sequence[RunSummary]) -> ReportSection:
    """The newest sweeps, with plots of their studies."""
    section = ReportSection("Sweeps")
    found = [story for story in stories if story.kind == "sweep"]
    for story in reversed(found[-_SWEEPS:]):
        section.head(story.label)
        _add(section, story)
    if len(found) > _SWEEPS:
        section.say(f"The newest {_SWEEPS} of {len(found)} sweeps are shown.")
    return section if found else section.say("There is no sweep in this folder.")


def _add(section: ReportSection, story: RunSummary) -> None:
    try:
        sweep_config = read_sweep_config(story.paths.folder)
    except RunFileError as error:
        section.say(f"Its sweep.yaml cannot be read: {shortened(str(error.__cause__), 200)}")
        return
    section.html(_table(story, sweep_config).html())
    if find_spec("optuna") is None:
        section.say("Its plots need Optuna: pip install optuna")
        return
    from nbtoolkit.study.storage import read_study

    try:
        study = read_study(story.paths.folder / STUDY_FILE)
        _add_plots(section, story, study, sweep_config.metrics)
    except SweepError as error:
        section.say(f"Its plots are missing: {error.what}.")


def _table(story: RunSummary, sweep_config: SweepConfig) -> SweepTable:
    table = SweepTable.of(sweep_config)
    table.read(story.events)
    return table


def _add_plots(
    section: ReportSection, story: RunSummary, study: Study, metrics: Sequence[str]
) -> None:
    for objective, metric in enumerate(metrics):
        for name, plot in _PLOTS.items():
            try:
                figure = plot(study, metric=metric, objective=objective)
            except SweepError as error:
                section.say(f"No plot of its {name}: {error.what}; it takes {error.allowed}.")
                continue
            alt = f"{name} of the sweep {story.label}, {metric}"
            section.picture(Picture(figure, alt))
