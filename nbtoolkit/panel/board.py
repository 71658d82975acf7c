"""Lay out the panel with the live page, controls above it, and the settings of the next run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Protocol

import ipywidgets as w

from nbtoolkit.cards import Card, Text, html
from nbtoolkit.panel.buttons import BUTTONS
from nbtoolkit.panel.setup import Setup
from nbtoolkit.panel.widgets import (
    CLASS,
    HIDDEN,
    STYLE,
    button,
    close_widget,
    column,
    html_widget,
    labelled,
    row_of,
    set_html,
    set_trait,
    show,
)
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.views.page import cards_of
from nbtoolkit.views.run_cards import log_names
from nbtoolkit.views.runs import RunEntry
from nbtoolkit.views.state import State
from nbtoolkit.views.trial_rows import SHOWS, View, columns, page_count
from nbtoolkit.views.watcher import DisplayPlace

_SAVED_SECONDS = 10.0  # between two updates of the page for saved notebooks

# By weight, not by colour: JupyterLab's orange has a contrast of 2.7 to its label, AA wants 4.5.
_BOLD = ("launch", "sweep", "cross_validate", "resume", "train_best")


class Actions(Protocol):
    """What the controls do; each call returns at once."""

    def on_button(self, name: str) -> None:
        """Press a button of :data:`~nbtoolkit.panel.buttons.BUTTONS`, or ``"stop_trial=3"``."""

    def on_choice(self, **changes: object) -> None:
        """Change what the page shows; see :class:`View`."""

    def on_run(self, folder: str) -> None:
        """Show another run; empty: none."""

    def on_load(self) -> None:
        """Put the settings of the run that is shown into the form."""


class Board:
    """All widgets of a panel.

    Args:
        setup: the widgets of the settings.
        actions: what the controls do.
        saved_class: the CSS class of the page for saved notebooks, which the widgets hide.

    Attributes:
        buttons: by the names of :data:`~nbtoolkit.panel.buttons.BUTTONS`.
        strip: the first card of the page, which is drawn every second.
        body: the other cards, which are drawn when something is new, so that a text stays selected.
        listed: folder and status of each run in the list.
        root: the widget that is displayed.
    """

    def __init__(self, setup: Setup, actions: Actions, saved_class: str) -> None:
        self.setup = setup
        self._actions = actions
        self.listed: tuple[tuple[str, str], ...] = ()
        self.strip = html_widget()
        self.body = html_widget()
        self.message = html_widget()
        self.place = html_widget(flex="1 1 0", min_width="0")
        self.buttons = {
            name: button(text, tooltip, partial(actions.on_button, name), bold=name in _BOLD)
            for name, (text, tooltip) in BUTTONS.items()
        }
        self.more = labelled(w.IntText, "add", {"width": "90px"}, value=10)
        self.more.observe(lambda _: actions.on_choice(), "value")  # which draws the button's label
        narrow = {"flex": "1 1 220px", "min_width": "120px", "max_width": "420px"}
        self.run = labelled(w.Dropdown, "run", narrow, options=[("(none)", "")])
        self.run.observe(lambda change: actions.on_run(change["new"]), "value")
        self.trials = self._trials_row()
        self.log = labelled(w.Dropdown, "log of", options=[("newest running", "")])
        self.log.observe(lambda change: actions.on_choice(log=change["new"]), "value")
        self.toggle = button("▸ Set up", "Open the settings of the next run", self._toggle)
        load = button("Settings of the run", "Copy those of the run that is shown", actions.on_load)
        self.load_run = load
        self._settings = column(load, setup.root)
        self._settings.add_class(HIDDEN)
        names = [*self.buttons]
        after = names.index("add_trials") + 1
        controls = [*self.buttons.values()]
        controls.insert(after, self.more)
        style = w.HTML(STYLE.replace("SAVED", saved_class), layout={"display": "none"})
        self.root = column(
            *(style, self.strip, row_of(*controls, self.place, self.run)),
            *(self.message, self.trials, self.body),
            *(row_of(self.toggle, self.log), self._settings),
        )
        self.root.add_class(CLASS)

    @property
    def is_set_up_open(self) -> bool:
        """Whether the settings are shown."""
        return HIDDEN not in self._settings._dom_classes

    def open_set_up(self, is_open: bool) -> None:
        """Show the settings, or hide them."""
        show(self._settings, is_open)
        set_trait(self.toggle, "description", f"{'▾' if is_open else '▸'} Set up")

    def _toggle(self) -> None:
        self.open_set_up(not self.is_set_up_open)

    def _trials_row(self) -> w.HBox:
        choose = self._actions.on_choice
        self.sort = labelled(w.Dropdown, "sort", {"width": "170px"}, options=[("best first", "")])
        self.sort.observe(lambda change: choose(sort=change["new"], page=0), "value")
        self.reverse = labelled(w.Checkbox, "reverse", {"width": "90px"}, indent=False)
        self.reverse.observe(lambda change: choose(reverse=change["new"], page=0), "value")
        self.filter = labelled(w.Dropdown, "show", {"width": "140px"}, options=SHOWS)
        self.filter.observe(lambda change: choose(show=change["new"], page=0), "value")
        self.page = labelled(w.BoundedIntText, "page", {"width": "90px"}, value=1, min=1, max=1)
        self.page.observe(lambda change: choose(page=change["new"] - 1), "value")
        self.trial = labelled(w.Dropdown, "trial", {"width": "110px"}, options=[])
        self.stop_trial = button("Stop trial", "Stop it at its next report", self._stop_trial)
        return row_of(
            *(self.sort, self.reverse, self.filter, self.page, self.trial, self.stop_trial)
        )

    def _stop_trial(self) -> None:
        if self.trial.value is not None:
            self._actions.on_button(f"stop_trial={self.trial.value}")

    def draw_strip(self, state: State | None) -> None:
        """Draw the line at the top of the page."""
        strip = cards_of(state, only=["strip"])
        set_html(self.strip, html(strip.values(), images=False))

    def draw_body(self, state: State | None, chosen: View, *, importance: bool) -> None:
        """Draw the cards of the page, and what can be chosen.

        Args:
            state: of the run; None: there is none.
            chosen: what the person chose to see.
            importance: whether the importance of parameters is drawn, which takes a second.
        """
        without = ["strip", *([] if importance else ["importance"])]
        cards = cards_of(state, chosen, without=without) if state is not None else {}
        set_html(self.body, html(cards.values(), images=False) if cards else "")
        table = None if state is None else state.table
        show(self.trials, isinstance(table, SweepTable))
        if state is not None and isinstance(table, SweepTable):
            headings = [(label, name) for name, label in columns(state).items()]
            _choose(self.sort, [("best first", ""), *headings], chosen.sort)
            set_trait(self.page, "max", page_count(table, chosen))
            set_trait(self.page, "value", min(chosen.page + 1, self.page.max))
            running = [(str(trial.number), trial.number) for trial in table.running]
            _choose(self.trial, running, self.trial.value)
            set_trait(self.stop_trial, "disabled", not running)
        logs = [("newest running", ""), *((name, name) for name in log_names(state))]
        _choose(self.log, logs, chosen.log)

    def draw_buttons(self, offered: set[str], enabled: set[str]) -> None:
        """Show the offered buttons."""
        for name, widget in self.buttons.items():
            show(widget, name in offered)
            set_trait(widget, "disabled", name not in enabled)
        show(self.more, "add_trials" in offered)
        set_trait(self.buttons["add_trials"], "description", f"+{self.more.value} trials")

    def draw_runs(self, runs: Sequence[RunEntry], watched: str) -> None:
        """List the runs of the output folder, with the watched one selected.

        The list is rewritten only when a run appears or ends: a rewrite closes it while a person
        chooses.
        """
        listed = tuple((str(entry.folder), entry.status) for entry in runs)
        options = [("(none)", ""), *((entry.text, str(entry.folder)) for entry in runs)]
        if watched not in [folder for _, folder in options]:
            options.append((Path(watched).name, watched))
            listed += ((watched, ""),)
        if listed != self.listed:
            self.run.options = options
            self.listed = listed
        set_trait(self.run, "value", watched)

    def draw_place(self, text: str) -> None:
        """Show on what the settings will run."""
        shown = escape(text)
        style = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis;line-height:28px"
        set_html(self.place, f'<div title="{shown}" style="{style};font-size:12px">{shown}</div>')

    def clear(self, text: str) -> None:
        """Show a sentence instead of a run."""
        set_html(self.strip, html([Card("", [Text(text)], span=4)]))
        set_html(self.body, "")
        show(self.trials, False)

    def close(self) -> None:
        """Close all widgets."""
        self.setup.table.close()
        close_widget(self.root)


def _choose(widget: w.Dropdown, options: Sequence[tuple[str, object]], value: object) -> None:
    """Set what can be chosen, and what is; the first, if the value is not there any more."""
    if widget.options != tuple(options):
        widget.options = options
    values = [option for _, option in options]
    if values:
        set_trait(widget, "value", value if value in values else values[0])


class SavedPage:
    """The page in an output of its own, for saved notebooks; see :meth:`Panel._ipython_display_`.

    Args:
        css_class: by which the widgets hide it while they are alive.
        render: returns the page.
    """

    def __init__(self, css_class: str, render: Callable[[], str]) -> None:
        self._class = css_class
        self._render = render
        self._place: DisplayPlace | None = None
        self._next = 0.0
        self._changed = False

    def show(self, page: str) -> None:
        """Show it in the running cell; called by the cell's own thread."""
        self._place = self._place or DisplayPlace()
        self._next = time.monotonic() + _SAVED_SECONDS
        page = f'<div class="{self._class}">{page}</div>'
        self._place.put({"text/html": page, "text/plain": ""})

    def update(self, *, changed: bool, now: bool) -> None:
        """Replace it if something has changed, at most every ten seconds.

        Args:
            changed: whether something has changed since the last call.
            now: whether it is replaced at once, since the run has ended.
        """
        self._changed = self._changed or changed
        if self._place is not None and self._changed and (now or time.monotonic() > self._next):
            self._changed = False
            self.show(self._render())
