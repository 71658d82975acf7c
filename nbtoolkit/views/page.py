"""Render a run, a sweep or a cross-validation as one page, for panel, live view and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import cache
from html import escape

from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import moment
from nbtoolkit.views import run_cards, sweep_cards, text
from nbtoolkit.views.chart import BEST, ENDED, FAILED, RUNNING
from nbtoolkit.views.markup import alert, card, chip, grid, paragraph, progress_bar, tinted
from nbtoolkit.views.state import State
from nbtoolkit.views.trial_rows import EVERYTHING, ROWS, View

__all__ = ["ROWS", "View", "page_html", "regions", "strip"]

_SIGNS = {
    "running": ("●", RUNNING),
    "paused": ("❙❙", RUNNING),
    "completed": ("✓", ENDED),
    "stopped": ("■", ENDED),
    "deadline": ("■", ENDED),
}
_ERROR = 600  # characters


def regions(
    state: State | None,
    chosen: View = EVERYTHING,
    now: float | None = None,
    *,
    only: Collection[str] = (),
) -> dict[str, str]:
    """Render the regions of a page that apply to a state, by name, in order.

    An error in one of them is shown in its place.

    Args:
        state: of the folder; None: there is no run.
        chosen: what the person chose to see.
        now: unix seconds; None: the clock's.
        only: the names of the regions that are needed; empty: all.
    """
    now = time.time() if now is None else now
    if state is None:
        return {
            "strip": card(
                "",
                paragraph("No run yet: Launch trains once, Sweep searches for settings."),
                span=4,
            )
        }
    shown = {}
    for name, render in _renderers(state, chosen, now).items():
        if only and name not in only:
            continue
        try:
            html = render()
        except Exception as error:
            html = card(name, alert(f"cannot be shown: {type(error).__name__}: {error}"))
        if html:
            shown[name] = html
    return shown


def page_html(state: State | None, chosen: View = EVERYTHING, now: float | None = None) -> str:
    """Render all regions as one static page."""
    if state is not None and not state.live and sweep_cards.IMPORTANCES.due(state):
        sweep_cards.IMPORTANCES.compute(state)
    return grid(*regions(state, chosen, now).values())


def _renderers(state: State, chosen: View, now: float) -> dict[str, Callable[[], str]]:
    renderers: dict[str, Callable[[], str]] = {"strip": lambda: strip(state, now)}
    table = state.table
    if isinstance(table, SweepTable):
        objectives = range(len(table.metrics))
        # All charts share them.
        axes = cache(lambda: [sweep_cards.value_axis(state, table, n) for n in objectives])
        if len(objectives) > 1:
            renderers["front"] = lambda: sweep_cards.front_card(table, axes())
        else:
            renderers["best"] = lambda: sweep_cards.best_card(state, table)
        if table.trials:
            renderers["history"] = lambda: sweep_cards.history_card(table, axes())
            renderers["curves"] = lambda: sweep_cards.curves_card(state, table, axes()[0])
            renderers["slices"] = lambda: sweep_cards.slices_card(state, table, axes())
        best_trials = [trial.number for trial in table.best]
        if best_trials:
            renderers["folds"] = lambda: run_cards.folds_card(state, best_trials[0])
        renderers["trials"] = lambda: sweep_cards.trials_card(state, chosen, now)
    elif state.kind == "cv":
        renderers["folds"] = lambda: run_cards.folds_card(state)
        renderers["curves"] = lambda: run_cards.fold_curves_card(state)
    else:
        renderers["metrics"] = lambda: run_cards.metrics_card(state, now)
        renderers["curves"] = lambda: run_cards.run_curves_card(state)
    renderers["workers"] = lambda: run_cards.workers_card(state, now)
    if isinstance(table, SweepTable):
        renderers["compare"] = lambda: sweep_cards.compare_card(state, table, chosen.ticked)
    renderers["log"] = lambda: run_cards.log_card(state, chosen.log)
    renderers["files"] = lambda: run_cards.files_card(state)
    return renderers


def _progress(state: State, now: float) -> str:
    return text.progress(state).removesuffix(" trials") or state.activity(now)


def strip(state: State, now: float) -> str:
    """Render name, status, progress, time and the best value in a line; below it what is wrong."""
    sign, colour = _SIGNS.get(state.status, ("✕", FAILED))
    hint = moment(state.ended.t) + " UTC" if state.ended else ""
    name, value, where = text.best(state)
    parts = [
        f'<b title="{escape(state.paths.run_id, quote=True)}">{escape(text.name_of(state))}</b>',
        chip(f"{sign} {text.status_of(state)}", colour, hint),
        progress_bar(state.share(), _progress(state, now)),
        escape(text.trial_counts(state)),
        f"<b>{escape(text.times(state, now))}</b>",
        escape(text.ended_ago(state, now)),
    ]
    if value:
        number = f'<b style="{tinted(BEST)}">{escape(value)}</b>'
        parts.append(f"{escape(name.partition(' ')[0])} {number} {escape(where)}")
    items = "".join(f"<span>{part}</span>" for part in parts if part)
    line = f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:0 12px">{items}</div>'
    explained, error = text.explanation(state), text.error_of(state)
    below = (paragraph(explained) if explained else "") + (alert(error[:_ERROR]) if error else "")
    return card("", line + below, span=4)
