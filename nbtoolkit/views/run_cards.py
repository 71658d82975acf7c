"""Render the cards of a run or a cross-validation, and those that all kinds share."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from html import escape

from pydantic import ValidationError

from nbtoolkit.config.schema import Config
from nbtoolkit.run.paths import read_or_empty
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import duration, metric_column, number, setting
from nbtoolkit.views.chart import (
    BEST,
    ENDED,
    FAILED,
    PALETTE,
    RUNNING,
    Axis,
    Series,
    Span,
    chart,
    sparkline,
    timeline,
)
from nbtoolkit.views.log import log_html, log_names
from nbtoolkit.views.markup import (
    alert,
    card,
    data_table,
    headline,
    paragraph,
    property_table,
    tiles,
)
from nbtoolkit.views.state import State
from nbtoolkit.views.text import best, best_point, curves_of, fold_scores, times
from nbtoolkit.views.timeline import JobSpan

_CHARTS = 6
_SPANS = 40  # of a row of the timeline
_LOG_RATIO = 20.0  # largest to smallest value, above which a loss has a logarithmic scale
_TRACEBACK = 8  # lines
_FILES = ("config.yaml", "sweep.yaml", "events.jsonl", "study.jsonl", "result.json", "error.json")


# --- single runs ---


def metrics_card(state: State, now: float) -> str:
    """Render a run's best and last values, its speed and the time left."""
    curves = curves_of(state)
    name, value, where = best(state)
    if not curves:
        return card(
            "Metrics", paragraph(state.activity(now) or "Nothing was reported.", faint=True)
        )
    lines = []
    for metric, points in curves.items():
        at = best_point(state, metric, points)
        last, top = metric_column([points[-1][1], at[1] if at else None])
        lines.append([metric, last, top, number(at[0]) if at else ""])
    facts = property_table({**state.speed(), "time": times(state, now)}, right=True)
    table = data_table(["", "last", "best", "at"], lines)
    return card(
        name[0].upper() + name[1:], headline(value) + paragraph(where, faint=True) + table + facts
    )


def run_curves_card(state: State) -> str:
    """Draw a run's metrics by step: training and validation of one quantity in one chart."""
    groups: dict[str, list[str]] = {}
    curves = {name: points for name, points in curves_of(state).items() if len(points) > 1}
    for name in curves:
        groups.setdefault(name.removeprefix("train_").removeprefix("val_"), []).append(name)
    pictures = []
    for names in list(groups.values())[:_CHARTS]:
        lines = []
        others = iter([*PALETTE[2:], *[ENDED] * len(names)])
        for name in names:
            train = name.startswith("train_")
            colour = ENDED if train else RUNNING if not lines else next(others)
            lines.insert(0, Series(name, curves[name], "dashed" if train else "line", colour))
            if at := best_point(state, name, curves[name]):
                lines += [] if train else [Series("best", [at], "ring", BEST, [number(at[1])])]
        values = [value for name in names for _, value in curves[name]]
        low = min(values)
        log = low > 0 and max(values) / low > _LOG_RATIO and "loss" in names[0]
        axis = Axis(log=log, low=low if log else None, high=max(values) if log else None)
        x = Axis("epoch" if "epoch" in state.speed() else "step", integer=True)
        pictures.append(chart(lines, x=x, y=axis, legend=True, size=(330, 185)))
    return card("Curves", tiles(pictures, 260), span=3) if pictures else ""


# --- cross-validations ---


def folds_card(state: State) -> str:
    """Render the folds of a cross-validation as columns, with mean and deviation."""
    folds = state.folds_table()
    if not folds:
        return ""
    scores = fold_scores(state)
    lines = [["state", *(fold.state for fold in folds), ""]]
    for name in scores:
        lines.append([name, *metric_column([f.metrics.get(name) for f in folds]), scores[name]])
    seconds = [fold.seconds for fold in folds]
    lines.append(["time", *("" if s is None else duration(s) for s in seconds), ""])
    header = ["", *(f"fold {fold.number}" for fold in folds), "mean ± sd"]
    _, value, where = best(state)
    top = headline(value) + paragraph(where, faint=True) if value else ""
    return card("Folds", top + data_table(header, lines), span=3)


def fold_curves_card(state: State) -> str:
    """Draw a line for each fold, in one chart per metric."""
    folds = state.folds_table()
    names = dict.fromkeys(n for f in folds for n, points in f.curves.items() if len(points) > 1)
    names = dict(sorted(names.items(), key=lambda pair: pair[0].startswith("train_")))
    pictures = []
    for name in list(names)[:_CHARTS]:
        lines = [
            Series(
                f"fold {f.number}", f.curves.get(name, []), colour=PALETTE[f.number % len(PALETTE)]
            )
            for f in folds
        ]
        pictures.append(paragraph(name) + chart(lines, legend=True, size=(330, 185)))
    return card("Curves", tiles(pictures, 260), span=3) if pictures else ""


# --- workers and devices ---


def workers_card(state: State, now: float) -> str:
    """Draw what each slot did over time; say what each does now, and how busy the devices are."""
    parts = []
    if state.kind != "run":
        found = state.workers(now)
        begin = max((row[-_SPANS:][0].begin for row in found), default=now)
        ends = [span.end or now for row in found for span in row]
        bars = [(f"slot {i}", _bars(state, row, begin, now)) for i, row in enumerate(found)]
        parts.append(timeline(bars, begin, now if state.live else max(ends, default=now)))
        if state.live and found:
            parts.append(
                property_table({f"slot {i}": _doing(state, row[-1]) for i, row in enumerate(found)})
            )
    history, lines = state.device_history(), state.device_lines()
    zero_to_one = Axis(low=0, high=1)
    for name, _, text in lines:
        picture = sparkline(history.get(name, []), f"use of {name}", y=zero_to_one, width=90, height=18)
        parts.append(
            f'<div style="display:flex;align-items:center;gap:8px;white-space:nowrap"><span>{escape(name)}</span>'
            f"{picture}<span>{escape(text)}</span></div>"
        )
    if state.live and not lines:
        parts.append(paragraph("Device readings appear after 5 s.", faint=True))
    parts.append(paragraph(_pace(state, now), faint=True))
    title = "Devices" if state.kind == "run" else "Workers"
    return card(title, "".join(parts), span=2) if any(parts) else ""


def _bars(state: State, row: list[JobSpan], begin: float, now: float) -> list[Span]:
    bars = []
    winners = (
        {trial.number for trial in state.table.best}
        if isinstance(state.table, SweepTable)
        else set()
    )
    for span in row[-_SPANS:]:
        end = now if span.end is None else span.end
        colour = {"running": RUNNING, "failed": FAILED}.get(span.state, ENDED)
        colour = BEST if span.number in winners and state.kind == "sweep" else colour
        title = f"{_job(state, span)}: {span.state}, {duration(end - span.begin)}"
        if end > begin:
            bars.append(Span(max(span.begin, begin), end, str(span.number), title, colour))
    return bars


def _job(state: State, span: JobSpan) -> str:
    if state.kind == "cv":
        return f"fold {span.number}"
    return f"trial {span.number}" + (f", fold {span.fold}" if span.fold is not None else "")


def _doing(state: State, span: JobSpan) -> str:
    """What a slot does now."""
    if span.state != "running":
        return "idle"
    text = _job(state, span)
    trial = state.table.trials.get(span.number) if isinstance(state.table, SweepTable) else None
    if trial is None or trial.latest is None:
        return f"{text}, no report yet" if trial is not None else text
    of = f"/{state.epochs}" if state.epochs else ""
    return f"{text}, step {trial.step}{of}, {number(trial.latest)}"


def _pace(state: State, now: float) -> str:
    """How many trials end per minute, and what pruning saved."""
    if not isinstance(state.table, SweepTable) or not state.table.ended:
        return ""
    parts = [f"{60 * state.table.ended / max(state.elapsed(now), 1e-3):.1f} trials/min"]
    saved = state.saved_by_pruning()
    parts += [f"pruning saved {100 * saved:.0f} % of the steps"] if saved else []
    return " · ".join(parts)


# --- log, files ---


def log_card(state: State, chosen: str) -> str:
    """Render the end of the chosen log, else of the newest running one."""
    logs = log_names(state)
    name = chosen if chosen in logs else next(iter(logs), "")
    return card("Log", log_html(logs[name]), span=2, note=name) if name else ""


def files_card(state: State) -> str:
    """Render where everything is, what differs from the default settings, notes and the error."""
    facts = {
        "changed settings": changed_settings(state.config),
        "devices": _devices(state),
        "folder": str(state.paths.folder),
        "files": ", ".join(name for name in _FILES if (state.paths.folder / name).exists()),
        "notes": "\n".join(state.notes),
    }
    body = property_table({name: text for name, text in facts.items() if text})
    if trace := read_or_empty(state.paths.error).get("traceback"):
        lines = str(trace).rstrip().splitlines()[-_TRACEBACK:]
        body += alert("\n".join([f"The end of the traceback in {state.paths.error}:", *lines]))
    return card("Settings and files", body, span=2)


def changed_settings(config: Mapping[str, object]) -> str:
    """List the settings that differ from the defaults; empty where they cannot be read."""
    with contextlib.suppress(ValidationError, TypeError):  # of an older version
        changed = Config.model_validate(config).differences(Config())
        return ", ".join(f"{name} {setting(value)}" for name, (value, _) in changed.items())
    return ""


def _devices(state: State) -> str:
    plan = state.plan
    listed = plan.get("device_names")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "CPU"
    return (
        f"{text}, {plan.get('processes', 1)} process(es), {plan.get('precision', '?')}"
        if plan
        else ""
    )
