"""Lay out the panel's widgets: strip, buttons, cards, trials and the sections below them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

import ipywidgets as w

from nbtoolkit.panel.actions import BUTTONS
from nbtoolkit.panel.setup import Setup
from nbtoolkit.panel.widgets import (
    HIDDEN,
    INVISIBLE,
    SIGNS,
    Sections,
    batched,
    button,
    close_widget,
    html,
    labelled,
    make,
    set_html,
    set_trait,
    show,
    sign_button,
    wrapped_row,
)
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import counted
from nbtoolkit.views.live import DisplayPlace
from nbtoolkit.views.markup import RULE, WIDGET_TEXT, card, paragraph
from nbtoolkit.views.page import regions
from nbtoolkit.views.run_cards import log_names
from nbtoolkit.views.runs import RunEntry
from nbtoolkit.views.state import State
from nbtoolkit.views.trial_rows import (
    ROWS,
    SHOWS,
    Column,
    TrialRow,
    View,
    row_html,
    template,
    trial_page,
)

_SAVED_SECONDS = 10.0  # between two updates of the page for saved notebooks

# --- style ---

CLASS = "nbtoolkit-panel"
"""The CSS class of the panel's outermost widget."""

# A grey whose contrast is above 3 on white (4.5) and on the dark theme's background (4.2).
_GREY = "#767676"

_ARROW = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='%23808080' stroke-width='2'/%3E%3C/svg%3E"
)

# The empty text behind the slash is what screen readers read of the sign: they read the name.
_SIGN_RULES = "".join(
    f'.nbtoolkit-{kind}::before {{ content: "{sign}"; content: "{sign}" / ""; }}'
    for kind, sign in SIGNS.items()
)

# What stock widgets lack (contrasts by WCAG 2.2): placeholders and titles of closed sections have
# less than 4.5 (SC 1.4.3), borders of fields 1.9 where SC 1.4.11 wants 3; dark lists have black
# arrows; the keyboard's focus is hardly visible. The last rules hide widgets, and the page
# for saved notebooks while the widgets are alive.
_STYLE = f"""<style>
.jupyter-widgets.{CLASS} {{
  color: {WIDGET_TEXT};
  --jp-widgets-input-border-color: {_GREY};
  --jp-widgets-input-focus-border-color: var(--jp-brand-color1, {_GREY});
}}
.jupyter-widgets.{CLASS} ::placeholder {{ color: var(--jp-ui-font-color2, {_GREY}); }}
.jupyter-widgets.{CLASS} .widget-dropdown > select {{ background-image: url("{_ARROW}"); }}
.jupyter-widgets.{CLASS} .widget-html-content {{ line-height: normal; min-width: 0; }}
.jupyter-widgets.{CLASS} .nbtoolkit-trials {{ border-radius: 6px; }}
.jupyter-widgets.{CLASS} .nbtoolkit-header button {{
  background: none; padding: 0 6px; font-weight: 600; text-align: left; overflow: hidden;
}}
.jupyter-widgets.{CLASS} .nbtoolkit-header button.nbtoolkit-right {{ text-align: right; }}
.jupyter-widgets.{CLASS} :is(button, input, select, textarea):focus-visible {{
  outline: 2px solid var(--jp-brand-color1, {_GREY}) !important;
  outline-offset: 1px;
}}
.jupyter-widgets.{CLASS} button.nbtoolkit-sign {{ font-size: 0; }}
.jupyter-widgets.{CLASS} button.nbtoolkit-sign::before {{ font-size: 13px; }}
{_SIGN_RULES}
.jupyter-widgets.{CLASS} .{INVISIBLE} {{ visibility: hidden; }}
.jupyter-widgets.{CLASS} .{HIDDEN}, .SAVED {{ display: none; }}
</style>"""

_CARDS = {
    "best": "1 1 200px",
    "metrics": "1 1 200px",
    "front": "2 1 280px",
    "history": "2 1 280px",
    "curves": "2 1 280px",
    "folds": "1 1 100%",
    "slices": "1 1 100%",
    "workers": "1 1 200px",
}
"""The regions beside the trials, each with its share of a row."""

SECTIONS = ("Set up", "Log", "Compare", "Files", "Code")
"""The titles of the sections below the cards, in order."""

# By weight, not by colour: JupyterLab's orange has a contrast of 2.7 to its label, AA wants 4.5.
_BOLD = ("launch", "sweep", "cross_validate", "resume", "train_best")

# --- the table of trials ---


@dataclass(eq=False)
class _Row:
    """The widgets of a row, the trial that it shows, and since when (monotonic seconds)."""

    tick: w.Checkbox
    cells: w.HTML
    stop: w.Button
    number: int | None = None
    since: float = 0.0


class TrialTable:
    """Rows that can be ticked, stopped and sorted; widgets are made when needed, and refilled.

    Args:
        on_sort: called with a column's name when its header is pressed.
        on_tick: called with a trial's number and whether it is ticked now.
        on_stop: called with a trial's number.
    """

    _MOVED = 0.4  # seconds in which a click may still mean the trial that stood in the row before

    def __init__(
        self,
        on_sort: Callable[[str], None],
        on_tick: Callable[[int, bool], None],
        on_stop: Callable[[int], object],
    ) -> None:
        self._on_sort, self._on_tick, self._on_stop = on_sort, on_tick, on_stop
        self._columns: Sequence[Column] = ()
        self.heads: list[w.Button] = []
        # A layout of its own, which changes with the columns.
        self._header = w.GridBox(_dom_classes=("nbtoolkit-header",))
        self.rows: list[_Row] = []
        columns = "24px minmax(min-content, 1fr) 62px"
        layout = {
            "grid_template_columns": columns,
            "grid_gap": "0 6px",
            "overflow": "auto",
            "width": "auto",
        }
        corners = make(w.HTML), make(w.HTML)  # above the ticks and above the stop buttons
        self.root = make(w.GridBox, layout, children=(corners[0], self._header, corners[1]))

    def fill(self, columns: Sequence[Column], rows: Sequence[TrialRow], chosen: View) -> None:
        """Show these rows."""
        self._fill_header(columns, chosen)
        if added := [self._make_row(trial, columns) for trial in rows[len(self.rows) : ROWS]]:
            self.rows += added
            parts = [part for row in added for part in (row.tick, row.cells, row.stop)]
            self.root.children = (*self.root.children, *parts)
        for shown, trial in zip_longest(self.rows, rows[:ROWS]):
            number = None if trial is None else trial.number
            if shown.number != number:
                shown.number, shown.since = number, time.monotonic()
            for widget in (shown.tick, shown.cells, shown.stop):
                show(widget, trial is not None)
            if trial is not None:
                set_trait(shown.cells, "value", row_html(trial, columns))
                set_trait(shown.tick, "description", f"compare trial {number}")
                set_trait(shown.stop, "description", f"Stop trial {number}")
                set_trait(shown.stop, "tooltip", f"Stop trial {number}")
                show(shown.stop, trial.running, INVISIBLE)
            set_trait(shown.tick, "value", number in chosen.ticked)

    def _fill_header(self, columns: Sequence[Column], chosen: View) -> None:
        self._columns = columns
        layout = {"width": "auto", "height": "24px", "margin": "0"}
        for index, shown in enumerate(columns):
            arrow = ("", " ▴" if chosen.reverse else " ▾")[shown.name == chosen.sort]
            traits: dict[str, Any] = {
                "description": f"{shown.label}{arrow}",
                "tooltip": f"Sort by {shown.label}",
                "_dom_classes": ("nbtoolkit-right",) if shown.right else (),
            }
            if index == len(self.heads):
                head = make(w.Button, layout, **traits)
                head.on_click(lambda _, index=index: self._on_sort(self._columns[index].name))
                self.heads.append(head)
            for name, value in traits.items():
                set_trait(self.heads[index], name, value)
        set_trait(self._header, "children", tuple(self.heads[: len(columns)]))
        set_trait(self._header.layout, "grid_template_columns", template(columns))

    def _make_row(self, trial: TrialRow, columns: Sequence[Column]) -> _Row:
        flat, clipped = {"height": "24px", "margin": "0"}, {"width": "22px", "overflow": "hidden"}
        ticks, stops = f"compare trial {trial.number}", f"Stop trial {trial.number}"
        made = _Row(
            make(w.Checkbox, {**flat, **clipped}, description=ticks, indent=False),
            html(row_html(trial, columns), margin="0", width="auto"),
            sign_button("stop", stops, visible=trial.running, **flat, width="62px", padding="0"),
        )
        made.tick.observe(lambda change: self._act(made, self._on_tick, change["new"]), "value")
        made.stop.on_click(lambda _: self._act(made, self._on_stop))
        return made

    def _act(self, row: _Row, act: Callable[..., object], *more: bool) -> None:
        """Call back with the row's trial, unless it has only just got into the row."""
        if row.number is not None and time.monotonic() - row.since > self._MOVED:
            act(row.number, *more)


# --- the panel ---


class Board:
    """All widgets of a panel.

    Args:
        setup: the widgets of the settings.
        table: the trials.
        hidden: the CSS class of the page for saved notebooks, which the widgets hide.

    Attributes:
        buttons: by the names of :data:`~nbtoolkit.panel.actions.BUTTONS`.
        cards: the HTML widget of each region, by name.
        listed: folder, status and name of each run in the list.
        root: the widget that is displayed.
    """

    def __init__(self, setup: Setup, table: TrialTable, hidden: str) -> None:
        self.setup, self.table = setup, table
        self.listed: tuple[tuple[str, str, str], ...] = ()
        self.message = html()
        self.place = html(flex="1 1 0", min_width="0", overflow="hidden")
        self.buttons = {
            name: button(text, tooltip, bold=name in _BOLD, disabled=True, _dom_classes=(HIDDEN,))
            for name, (text, tooltip) in BUTTONS.items()
        }
        wrong = "Open the setting that is wrong"
        self.errors = button("errors", wrong, _dom_classes=(HIDDEN,))
        narrow = {"flex": "1 1 220px", "min_width": "120px", "max_width": "420px"}
        self.run = labelled(w.Dropdown, "run", narrow, options=[("(none)", "")])
        actions = wrapped_row(
            *self.buttons.values(), self.errors, self.place, self.run, gap="0 6px"
        )
        self.question = html()
        self.yes, self.no = button("Yes", "Do it"), button("No", "Do nothing")
        self.asking = wrapped_row(self.question, self.yes, self.no, _dom_classes=(HIDDEN,))
        places = {**dict.fromkeys(("strip", "log", "compare", "files"), "auto"), **_CARDS}
        self.cards = {
            name: html(width="auto", margin="0", flex=flex) for name, flex in places.items()
        }
        self.strip, self.trials = self.cards["strip"], self._trials_box()
        page = [self.cards[name] for name in _CARDS]
        page.insert(-1, self.trials)
        grid = wrapped_row(*page, gap="8px", align="stretch")
        contents = dict(zip(SECTIONS, self._sections(), strict=True))
        self.sections = Sections(contents, self._before_open)
        self.notice = make(w.Output)
        style = html(_STYLE.replace("SAVED", hidden), display="none")
        top = [style, self.strip, actions, self.asking, self.message]
        parts = [*top, grid, self.sections.root, self.notice]
        self.root = make(w.VBox, children=parts, _dom_classes=(CLASS,))

    # --- drawing ---

    def batched(self) -> AbstractContextManager[None]:
        """Send what is drawn in this context as one message for each widget."""
        return batched(self.root)

    def draw(self, state: State | None, chosen: View) -> None:
        """Draw the page of a run, with what the person chose to see; changed parts only."""
        parts = regions(state, chosen, only=self.cards)
        for name, widget in self.cards.items():
            set_html(widget, parts.get(name, ""))
        self._draw_trials(state, chosen)
        logs = ["", *log_names(state)]
        set_trait(self.log, "options", tuple((name or "newest running", name) for name in logs))
        set_trait(self.log, "value", chosen.log if chosen.log in logs else "")

    def _draw_trials(self, state: State | None, chosen: View) -> None:
        is_sweep = state is not None and isinstance(state.table, SweepTable)
        show(self.trials, is_sweep)
        show(self.sections.headings["Compare"], is_sweep)
        if state is None or not is_sweep:
            return
        page = trial_page(state, chosen)
        self.table.fill(page.columns, page.rows, chosen)
        set_html(self.count, f"<b>Trials</b> {escape(page.text)}")
        set_trait(self.previous, "disabled", chosen.page <= 0)
        set_trait(self.next, "disabled", chosen.page >= page.pages - 1)

    def draw_buttons(self, offered: set[str], enabled: set[str], mistakes: Sequence[str]) -> None:
        """Show the offered buttons, and the number of mistakes in the form with the first one."""
        for name, widget in self.buttons.items():
            show(widget, name in offered)
            set_trait(widget, "disabled", name not in enabled)
        set_trait(self.buttons["add_trials"], "description", f"+{self.more.value} trials")
        show(self.errors, bool(mistakes))
        text = f"{counted(len(mistakes), 'error')}: {''.join(mistakes[:1])}"
        set_trait(self.errors, "description", text)

    def draw_runs(self, runs: Sequence[RunEntry], watched: str) -> None:
        """List the runs of the output folder, with the watched one selected.

        The list is rewritten only when a run appears, ends or is renamed: a rewrite closes it while
        a person chooses.
        """
        listed = tuple((str(entry.folder), entry.status, entry.name) for entry in runs)
        options = [("(none)", ""), *((entry.text, str(entry.folder)) for entry in runs)]
        if watched not in [folder for _, folder in options]:
            options.append((Path(watched).name, watched))
            listed += ((watched, "", ""),)
        if listed != self.listed:
            self.run.options, self.listed = options, listed
        set_trait(self.run, "value", watched)

    def draw_plan(self, place: str, code: str) -> None:
        """Show on what the form's settings will run, and the same settings as code."""
        text = escape(place)
        style = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis;line-height:28px"
        set_html(self.place, f'<div title="{text}" style="{style};font-size:12px">{text}</div>')
        set_trait(self.code, "value", code)

    def draw_best_code(self, code: str) -> None:
        """Show the best settings as code; empty: there are none."""
        set_trait(self.best_code, "value", code)
        show(self.best_code, bool(code))

    def clear(self, text: str) -> None:
        """Show a sentence instead of a run."""
        for name, widget in self.cards.items():
            set_html(widget, card("", paragraph(text)) if name == "strip" else "")
        show(self.trials, False)

    def mark_tab(self, status: str) -> None:
        """Mark the browser's tab; nothing but a script can do that."""
        sign = json.dumps("✓ " if status == "completed" else "✕ ")
        script = f"document.title = {sign} + document.title.replace(/^[✓✕] /, '')"
        data = {"application/javascript": script}
        output = {"output_type": "display_data", "data": data, "metadata": {}}
        self.notice.outputs = (output,)

    # --- parts ---

    def close(self) -> None:
        """Close all widgets."""
        self.setup.close()
        self.sections.close()
        for widget in (*self.table.heads, self.root):
            close_widget(widget)

    def _before_open(self, section: str) -> None:
        if section == SECTIONS[0]:
            self.setup.build()

    def _trials_box(self) -> w.VBox:
        self.count = html()
        self.filter = labelled(w.Dropdown, "show", {"width": "140px"}, options=SHOWS)
        self.more = labelled(w.IntText, "add", {"width": "100px"}, value=10)
        self.previous = sign_button("previous", "The page before")
        self.next = sign_button("next", "The next page")
        wide, hidden = {"flex": "1 1 200px"}, (HIDDEN,)
        self.note = labelled(w.Text, "note", wide, continuous_update=False, _dom_classes=hidden)
        border = f"1px solid {RULE}"
        layout = {"flex": "3 1 500px", "border": border, "padding": "4px 8px", "min_width": "0"}
        head = wrapped_row(self.count, self.filter, self.more)
        foot = wrapped_row(self.previous, self.next, self.note)
        classes = ("nbtoolkit-trials", HIDDEN)
        return make(w.VBox, layout, children=(head, self.table.root, foot), _dom_classes=classes)

    def _sections(self) -> list[list[w.Widget]]:
        self.load_run = button("Settings of the run", "Copy the settings of the run that is shown")
        mark = "mark the browser tab at the end"
        self.notify = make(w.Checkbox, description=mark, indent=False)
        self.log = labelled(w.Dropdown, "log of", options=[("newest running", "")])
        self.name = labelled(w.Text, "run name", {"width": "420px"})
        self.rename = button("Rename", "Give the run that is shown another name")
        self.delete = button("Delete", "Move the run that is shown to the folder .trash")
        self.csv = button("Write trials.csv", "Into the folder of the sweep that is shown")
        large = {"width": "99%", "height": "180px"}
        self.best_code = labelled(w.Textarea, "best settings", large)
        self.code = labelled(w.Textarea, "Set up as code", large)
        named = wrapped_row(self.name, self.rename, self.delete, self.csv)
        return [
            [self.setup.root, self.load_run, self.notify],
            [self.log, self.cards["log"]],
            [self.cards["compare"]],
            [self.cards["files"], named],
            [self.best_code, self.code],
        ]


# --- saved notebooks ---


class SavedPage:
    """The page in an output of its own, for saved notebooks; see :meth:`Panel._ipython_display_`.

    Args:
        css_class: by which the widgets hide it while they are alive.
        render: returns the page.
    """

    def __init__(self, css_class: str, render: Callable[[], str]) -> None:
        self._class, self._render = css_class, render
        self._place: DisplayPlace | None = None
        self._next, self._changed = 0.0, False

    def show(self, html: str) -> None:
        """Show it in the running cell; called by the cell's own thread."""
        self._place = self._place or DisplayPlace()
        self._next = time.monotonic() + _SAVED_SECONDS
        html = f'<div class="{self._class}">{html}</div>'
        self._place.put({"text/html": html, "text/plain": ""})

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
