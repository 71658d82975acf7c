"""Lay out the panel's widgets: strip, buttons, cards, trials and the sections below them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from nbtoolkit.panel.actions import BUTTONS
from nbtoolkit.panel.form import Sections, set_trait
from nbtoolkit.views.trial_rows import ROWS, SHOWS, Column, TrialRow, View, row_html, template

if TYPE_CHECKING:
    import ipywidgets

    from nbtoolkit.panel.setup import Setup

# --- style ---

CLASS = "nbtoolkit-panel"
"""The CSS class of the panel's outermost widget."""

# A grey whose contrast is above 3 on white (4.5) and on the dark theme's background (4.2).
_GREY = "#767676"

_ARROW = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='%23808080' stroke-width='2'/%3E%3C/svg%3E"
)

# What stock widgets lack (contrasts by WCAG 2.2): placeholders and titles of closed sections have
# less than 4.5 (SC 1.4.3), borders of fields 1.9 where SC 1.4.11 wants 3; dark lists have black
# arrows; the keyboard's focus is hardly visible. The last rule hides the page for saved notebooks
# while the widgets are alive.
_STYLE = f"""<style>
.jupyter-widgets.{CLASS} {{
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
.SAVED {{ display: none; }}
</style>"""

_CARDS = {
    "best": "1 1 200px",
    "metrics": "1 1 200px",
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

# It wraps in a narrow window.
_WRAPPED_ROW = {"flex_flow": "row wrap", "grid_gap": "0 10px", "align_items": "center"}


def show(widget: ipywidgets.Widget, visible: bool) -> None:
    """Show a widget, or take it out of the layout."""
    set_trait(widget.layout, "display", None if visible else "none")


def set_html(widget: ipywidgets.HTML, html: str) -> None:
    """Set an HTML widget's text; an empty one takes no room."""
    set_trait(widget, "value", html)
    show(widget, bool(html))


# --- the table of trials ---


@dataclass(eq=False)
class _Row:
    """The widgets of a row, the trial that it shows, and since when (monotonic seconds)."""

    tick: ipywidgets.Checkbox
    cells: ipywidgets.HTML
    stop: ipywidgets.Button
    number: int | None = None
    since: float = 0.0


class TrialTable:
    """Rows that can be ticked, stopped and sorted; the widgets are made once and refilled.

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
        import ipywidgets as w

        self._on_sort, self._on_tick, self._on_stop = on_sort, on_tick, on_stop
        self._columns: Sequence[Column] = ()
        self.heads: list[ipywidgets.Button] = []
        self._header = w.GridBox()
        self._header.add_class("nbtoolkit-header")
        self.rows = [self._make_row() for _ in range(ROWS)]
        cells = [w.HTML(), self._header, w.HTML()]
        cells += [part for row in self.rows for part in (row.tick, row.cells, row.stop)]
        columns = "24px minmax(min-content, 1fr) 30px"
        self.root = w.GridBox(
            cells, layout={"grid_template_columns": columns, "overflow": "auto", "width": "auto"}
        )

    def fill(self, columns: Sequence[Column], rows: Sequence[TrialRow], chosen: View) -> None:
        """Show these rows."""
        self._fill_header(columns, chosen)
        for row, trial in zip_longest(self.rows, rows[:ROWS]):
            number = None if trial is None else trial.number
            if row.number != number:
                row.number, row.since = number, time.monotonic()
            for widget in (row.tick, row.cells, row.stop):
                show(widget, trial is not None)
            if trial is not None:
                set_trait(row.cells, "value", row_html(trial, columns))
                set_trait(row.tick, "description", f"compare trial {number}")
                set_trait(row.stop, "tooltip", f"Stop trial {number} at its next report")
                set_trait(row.stop.layout, "visibility", "visible" if trial.running else "hidden")
            set_trait(row.tick, "value", number in chosen.ticked)

    def _fill_header(self, columns: Sequence[Column], chosen: View) -> None:
        self._columns = columns
        while len(self.heads) < len(columns):
            self.heads.append(self._make_head(len(self.heads)))
        for head, column in zip(self.heads, columns, strict=False):
            arrow = ("", " ▴" if chosen.reverse else " ▾")[column.name == chosen.sort]
            set_trait(head, "description", f"{column.label}{arrow}")
            set_trait(head, "tooltip", f"Sort by {column.label}")
            (head.add_class if column.right else head.remove_class)("nbtoolkit-right")
        set_trait(self._header, "children", tuple(self.heads[: len(columns)]))
        set_trait(self._header.layout, "grid_template_columns", template(columns))

    def _make_head(self, index: int) -> ipywidgets.Button:
        import ipywidgets as w

        head = w.Button(layout={"width": "auto", "height": "24px", "margin": "0"})
        head.on_click(lambda _: self._on_sort(self._columns[index].name))
        return head

    def _make_row(self) -> _Row:
        import ipywidgets as w

        flat, clipped = {"height": "24px", "margin": "0"}, {"width": "22px", "overflow": "hidden"}
        row = _Row(
            w.Checkbox(description="compare", indent=False, layout={**flat, **clipped}),
            w.HTML(layout={"margin": "0", "width": "auto"}),
            w.Button(description="■", layout={**flat, "width": "28px", "padding": "0"}),
        )
        row.tick.observe(lambda change: self._act(row, self._on_tick, change["new"]), "value")
        row.stop.on_click(lambda _: self._act(row, self._on_stop))
        return row

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
        root: the widget that is displayed.
    """

    def __init__(self, setup: Setup, table: TrialTable, hidden: str) -> None:
        import ipywidgets as w

        self.setup, self.table = setup, table
        self.strip, self.message = w.HTML(layout={"margin": "0 2px"}), w.HTML()
        self.place = w.HTML(layout={"flex": "1 1 0", "min_width": "0", "overflow": "hidden"})
        self.buttons = {
            name: _button(label, tooltip, bold=name in _BOLD)
            for name, (label, tooltip) in BUTTONS.items()
        }
        self.errors = _button("errors", "Open the setting that is wrong")
        narrow = {"flex": "1 1 220px", "min_width": "120px", "max_width": "420px"}
        self.run = w.Dropdown(options=[("(none)", "")], **_label("run", **narrow))
        row = [*self.buttons.values(), self.errors, self.place, self.run]
        self.actions = w.HBox(row, layout={"flex_flow": "row wrap", "grid_gap": "0 6px"})
        self.question, self.yes, self.no = (
            w.HTML(),
            _button("Yes", "Do it"),
            _button("No", "Do nothing"),
        )
        self.asking = w.HBox([self.question, self.yes, self.no], layout=_WRAPPED_ROW)
        places = {**_CARDS, "log": "auto", "compare": "auto", "files": "auto"}
        self.cards = {
            name: w.HTML(layout={"width": "auto", "margin": "0", "flex": flex})
            for name, flex in places.items()
        }
        self.trials = self._trials_box()
        page = [self.cards[name] for name in _CARDS]
        page.insert(-1, self.trials)
        grid = w.HBox(page, layout={"flex_flow": "row wrap", "grid_gap": "8px"})
        self.sections = Sections(dict(zip(SECTIONS, self._sections(), strict=True)))
        self.notice = w.Output()
        style = w.HTML(_STYLE.replace("SAVED", hidden), layout={"display": "none"})
        top = [style, self.strip, self.actions, self.asking, self.message]
        self.root = w.VBox([*top, grid, self.sections.root, self.notice])
        self.root.add_class(CLASS)
        for widget in (self.asking, self.errors, self.note, self.message):
            show(widget, False)

    def open(self, section: str) -> None:
        """Open one of :data:`SECTIONS`."""
        self.sections.open(section)

    def _trials_box(self) -> ipywidgets.VBox:
        import ipywidgets as w

        self.count = w.HTML()
        self.filter = w.Dropdown(options=SHOWS, **_label("show", width="140px"))
        self.more = w.IntText(10, **_label("add", width="100px"))
        self.previous = _button("◀", "The page before")
        self.next = _button("▶", "The next page")
        self.note = w.Text(continuous_update=False, **_label("note", flex="1 1 200px"))
        head = w.HBox([self.count, self.filter, self.more], layout=_WRAPPED_ROW)
        foot = w.HBox([self.previous, self.next, self.note], layout=_WRAPPED_ROW)
        border = "1px solid var(--jp-border-color2, #8884)"
        layout = {"flex": "3 1 500px", "border": border, "padding": "4px 8px", "min_width": "0"}
        box = w.VBox([head, self.table.root, foot], layout=layout)
        box.add_class("nbtoolkit-trials")
        return box

    def _sections(self) -> list[ipywidgets.VBox]:
        import ipywidgets as w

        self.load_run = _button("Settings of the run", "Copy the settings of the run that is shown")
        self.notify = w.Checkbox(description="mark the browser tab at the end", indent=False)
        self.log = w.Dropdown(options=[("newest running", "")], **_label("log of"))
        self.name = w.Text(**_label("run name", width="420px"))
        self.rename = _button("Rename", "Give the run that is shown another name")
        self.delete = _button("Delete", "Move the run that is shown to the folder .trash")
        self.csv = _button("Write trials.csv", "Into the folder of the sweep that is shown")
        self.best_code = w.Textarea(**_label("best settings", width="99%", height="180px"))
        self.code = w.Textarea(**_label("Set up as code", width="99%", height="180px"))
        named = w.HBox([self.name, self.rename, self.delete, self.csv], layout=_WRAPPED_ROW)
        contents: list[list[ipywidgets.Widget]] = [
            [self.setup.root, self.load_run, self.notify],
            [self.log, self.cards["log"]],
            [self.cards["compare"]],
            [self.cards["files"], named],
            [self.best_code, self.code],
        ]
        return [w.VBox(widgets) for widgets in contents]


def _label(text: str, **layout: str) -> dict[str, Any]:
    """Return the traits of a field with a label as wide as its text."""
    style = {"description_width": "initial"}
    return {"description": text, "style": style, "layout": {"max_width": "99%", **layout}}


def _button(label: str, tooltip: str, *, bold: bool = False) -> ipywidgets.Button:
    import ipywidgets as w

    weight = {"font_weight": "bold" if bold else "normal"}
    layout = {"width": "auto", "flex": "0 0 auto"}
    return w.Button(description=label, tooltip=tooltip, style=weight, layout=layout)
