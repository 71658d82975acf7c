"""Write a report's overview, differing settings, folds and sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nbtoolkit.crossval.cv_result import FoldTable
from nbtoolkit.errors import RunFileError, SweepError
from nbtoolkit.report.charts import add_curves
from nbtoolkit.report.run_summary import KIND_NAMES, RunSummary
from nbtoolkit.report.section import Picture, ReportSection
from nbtoolkit.run.resume import decides_result
from nbtoolkit.search.sweep_result import STUDY_FILE, read_sweep_config
from nbtoolkit.study.plots import plot_history, plot_importances, plot_slices
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import counted, duration, moment, number, setting, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study


# --- overview ---

_METRICS = 5  # columns


def overview(runs: Sequence[RunSummary]) -> ReportSection:
    """Tabulate the runs, oldest first; below, why runs failed and which files cannot be read."""
    section = ReportSection("Runs")
    if not runs:
        return section.paragraph("There are no runs in this folder.")
    metrics = _most_common_metrics(runs)
    names = [shortened(metric, 28) for metric in metrics]
    header = ["run", "what", "status", *names, "took", "device", "began (UTC)"]
    section.table(header, [_overview_row(run, metrics) for run in runs])
    for run in runs:
        for sentence in _problems(run):
            section.paragraph(f"{run.label}: {sentence}")
    return section


def _most_common_metrics(runs: Sequence[RunSummary]) -> list[str]:
    """Return the metrics that most runs have; those of validation before others."""
    counts = Counter(name for run in runs for name in run.metrics)
    ranked = sorted(counts, key=lambda name: (not name.startswith("val_"), -counts[name]))
    return ranked[:_METRICS]


def _overview_row(run: RunSummary, metrics: Sequence[str]) -> list[str]:
    attempts = f", in {counted(run.attempts, 'attempt')}" if run.attempts > 1 else ""
    return [
        run.label,
        KIND_NAMES[run.kind],
        run.status,
        *(number(run.metrics.get(name)) for name in metrics),
        duration(run.seconds) + attempts,
        shortened(run.device, 32),
        moment(run.began),
    ]


def _problems(run: RunSummary) -> list[str]:
    problems = [f"{name} cannot be read" for name in run.damaged]
    if run.error:
        kind = str(run.error.get("type", "")).removeprefix("builtins.")
        text = f"{kind}: {run.error.get('text', '')}"
        problems.append(f"failed: {shortened(text, 300)}")
    if run.status == "cut off":
        problems.append("cut off: its process died; the same launch resumes it")
    return problems


# --- differences ---

_COMPARED = 8  # the newest runs
_ABSENT = object()


def differences(runs: Sequence[RunSummary]) -> ReportSection:
    """Tabulate the settings that are not the same in all runs, a column per run.

    Settings that change what a run computes come first.
    """
    section = ReportSection("Differences of configurations")
    compared = [run for run in runs if run.config][-_COMPARED:]
    if len(compared) < 2:
        return section.paragraph("There are no two configurations to compare.")
    configs = [_flat(run.config) for run in compared]
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name, _ABSENT) for config in configs] for name in names}
    differing = [name for name in names if any(v != values[name][0] for v in values[name])]
    if not differing:
        return section.paragraph(f"The {len(compared)} configurations are equal.")
    differing.sort(key=lambda name: not decides_result(name, compared[-1].config))
    rows = [
        [name, *("" if value is _ABSENT else setting(value) for value in values[name])]
        for name in differing
    ]
    section.table(["setting", *(run.label for run in compared)], rows)
    if len(compared) < len(runs):
        section.paragraph(f"The newest {len(compared)} of {len(runs)} runs are compared.")
    return section


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested settings by dotted name."""
    settings: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            settings |= _flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings


# --- searches ---

_SHOWN = 3  # the newest cross-validations, and the newest sweeps


def folds(runs: Sequence[RunSummary]) -> ReportSection:
    """Tabulate the folds' scores of the newest cross-validations, and draw the folds' curves."""
    section = ReportSection("Cross-validations")
    searches = [run for run in runs if run.kind == "cv"]
    for run in reversed(searches[-_SHOWN:]):
        count = run.totals.get("folds")  # absent before the end
        table = FoldTable(name=run.label, folds=count if isinstance(count, int) else None)
        table.read(run.events)
        section.heading(run.label).html(table.html())
        add_curves(section, run.folds)
    return _with_count(section, "cross-validation", len(searches))


def sweeps(runs: Sequence[RunSummary]) -> ReportSection:
    """Tabulate the newest sweeps' trials, and plot their studies."""
    section = ReportSection("Sweeps")
    searches = [run for run in runs if run.kind == "sweep"]
    for run in reversed(searches[-_SHOWN:]):
        section.heading(run.label)
        _add_sweep(section, run)
    return _with_count(section, "sweep", len(searches))


def _with_count(section: ReportSection, noun: str, count: int) -> ReportSection:
    if count > _SHOWN:
        section.paragraph(f"The newest {_SHOWN} of {count} {noun}s are shown.")
    return section if count else section.paragraph(f"There is no {noun} in this folder.")


_PLOTS: dict[str, Callable[..., Figure]] = {
    "history": plot_history,
    "importances": plot_importances,
    "slices": plot_slices,
}


def _add_sweep(section: ReportSection, run: RunSummary) -> None:
    try:
        sweep_config = read_sweep_config(run.paths.folder)
    except RunFileError as error:
        reason = shortened(str(error.__cause__), 200)
        section.paragraph(f"Its sweep.yaml cannot be read: {reason}")
        return
    table = SweepTable.of(sweep_config)
    table.read(run.events)
    section.html(table.html())
    if find_spec("optuna") is None:
        section.paragraph("Its plots need Optuna: pip install optuna")
        return
    from nbtoolkit.study.storage import read_study

    try:
        study = read_study(run.paths.folder / STUDY_FILE)
        _add_plots(section, run, study, sweep_config.metrics)
    except SweepError as error:
        section.paragraph(f"Its plots are missing: {error.what}.")


def _add_plots(
    section: ReportSection, run: RunSummary, study: Study, metrics: Sequence[str]
) -> None:
    for objective, metric in enumerate(metrics):
        for name, plot in _PLOTS.items():
            try:
                figure = plot(study, metric=metric, objective=objective)
            except SweepError as error:
                section.paragraph(f"No plot of its {name}: {error.what}; it takes {error.allowed}.")
                continue
            alt = f"{name} of the sweep {run.label}, {metric}"
            section.picture(Picture(figure, alt))
