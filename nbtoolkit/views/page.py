"""Make the page of a run, a sweep or a cross-validation: its cards, for all who show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import cache

from nbtoolkit.cards import (
    ENDED,
    FAILED,
    RUNNING,
    Bar,
    Card,
    Chip,
    Line,
    Part,
    Text,
)
from nbtoolkit.cards import html as html_of
from nbtoolkit.cards import text as text_of
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.views import run_cards, sweep_cards, text
from nbtoolkit.views.state import State
from nbtoolkit.views.trial_rows import EVERYTHING, ROWS, View

__all__ = ["ROWS", "View", "cards_of", "page_html", "page_text", "strip"]

_SIGNS = {
    "running": ("●", RUNNING),
    "paused": ("❙❙", RUNNING),
    "completed": ("✓", ENDED),
    "stopped": ("■", ENDED),
    "deadline": ("■", ENDED),
}
_ERROR = 600  # characters


def cards_of(
    state: State | None,
    chosen: View = EVERYTHING,
    now: float | None = None,
    *,
    only: Collection[str] = (),
    without: Collection[str] = (),
) -> dict[str, Card]:
    """Return the cards that apply to a state, by name, in order.

    An error in one of them is shown in its place.

    Args:
        state: of the folder; None: there is no run.
        chosen: what the person chose to see.
        now: unix seconds; None: the clock's.
        only: the names of the cards that are needed; empty: all.
        without: the names of cards that are left out.
    """
    now = time.time() if now is None else now
    if state is None:
        told = Text("No run yet: Launch trains once, Sweep searches for settings.")
        return {"strip": Card("", [told], span=4)}
    cards = {}
    for name, make in _makers(state, chosen, now).items():
        if name in without or (only and name not in only):
            continue
        try:
            card = make()
        except Exception as error:
            told = Text(f"cannot be shown: {type(error).__name__}: {error}", "alert")
            card = Card(name, [told])
        if card is not None:
            cards[name] = card
    return cards


def page_html(
    state: State | None,
    chosen: View = EVERYTHING,
    now: float | None = None,
    *,
    images: bool = True,
    without: Collection[str] = (),
) -> str:
    """Write all cards as HTML; the arguments are those of :func:`cards_of` and ``cards.html``."""
    return html_of(cards_of(state, chosen, now, without=without).values(), images=images)


def page_text(state: State | None, chosen: View = EVERYTHING, now: float | None = None) -> str:
    """Write all cards as text, but the log."""
    return text_of(cards_of(state, chosen, now, without=["log"]).values())


def _makers(state: State, chosen: View, now: float) -> dict[str, Callable[[], Card | None]]:
    makers: dict[str, Callable[[], Card | None]] = {"strip": lambda: strip(state, now)}
    table = state.table
    if isinstance(table, SweepTable):
        objectives = range(len(table.metrics))
        # All charts share them.
        axes = cache(lambda: [sweep_cards.value_axis(state, table, n) for n in objectives])
        if len(objectives) > 1:
            makers["front"] = lambda: sweep_cards.front_card(table, axes())
        else:
            makers["best"] = lambda: sweep_cards.best_card(state, table)
        if table.trials:
            makers["history"] = lambda: sweep_cards.history_card(table, axes())
            makers["curves"] = lambda: sweep_cards.curves_card(state, table, axes()[0])
            makers["slices"] = lambda: sweep_cards.slices_card(state, table, axes())
            makers["importance"] = lambda: sweep_cards.importance_card(state, table)
        best_trials = [trial.number for trial in table.best]
        if best_trials:
            makers["folds"] = lambda: run_cards.folds_card(state, best_trials[0])
        makers["trials"] = lambda: sweep_cards.trials_card(state, chosen, now)
    elif state.kind == "cv":
        makers["folds"] = lambda: run_cards.folds_card(state)
        makers["curves"] = lambda: run_cards.fold_curves_card(state)
    else:
        makers["metrics"] = lambda: run_cards.metrics_card(state, now)
        makers["curves"] = lambda: run_cards.run_curves_card(state)
    makers["workers"] = lambda: run_cards.workers_card(state, now)
    makers["log"] = lambda: run_cards.log_card(state, chosen.log)
    makers["files"] = lambda: run_cards.files_card(state)
    return makers


def strip(state: State, now: float) -> Card:
    """Show name, status, progress, time and the best value in a line; below it what is wrong."""
    sign, colour = _SIGNS.get(state.status, ("✕", FAILED))
    name, value, where = text.best(state)
    share = state.share()
    progress = _progress(state, now)
    line: list[Text | Chip | Bar] = [
        Text(text.name_of(state), "bold", state.paths.run_id),
        Chip(f"{sign} {text.status_of(state)}", colour),
        Text(progress) if share is None else Bar(share, progress),
        Text(text.trial_counts(state)),
        Text(text.times(state, now), "bold"),
        Text(text.ended_at(state)),
    ]
    if value:
        line += [Text(name.partition(" ")[0]), Text(value, "headline"), Text(where)]
    parts: list[Part] = [Line([part for part in line if part.text])]
    if explained := text.explanation(state):
        parts.append(Text(explained))
    if error := text.error_of(state):
        parts.append(Text(error[:_ERROR], "alert"))
    return Card("", parts, span=4)


def _progress(state: State, now: float) -> str:
    return text.progress(state).removesuffix(" trials") or state.activity(now)
