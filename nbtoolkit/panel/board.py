"""Lay out the panel's widgets, its links to dashboards, and the rules for its buttons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbtoolkit.config.schema import Config
from nbtoolkit.dashboards.mlflow_server import no_mlflow, open_mlflow
from nbtoolkit.dashboards.server import Dashboard
from nbtoolkit.dashboards.study_dashboard import no_dashboard, open_dashboard
from nbtoolkit.errors import DashboardError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.panel.form import Checked, Form
from nbtoolkit.study.table import SweepTable
from nbtoolkit.views.markup import boxed, said, wrong
from nbtoolkit.views.state import State

# --- style ---
# What the stock widgets lack in contrast, beside a panel's widgets and for them alone.


CLASS = "nbtoolkit-panel"
"""Of the panel's outermost widget."""

# A grey whose contrast is above 3 on white (4.5) and on the dark theme's ground (4.2).
_GREY = "#767676"

_ARROW = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='%23808080' stroke-width='2'/%3E%3C/svg%3E"
)

# What the stock has (contrasts by WCAG 2.2): labels of tabs 4.2 to 4.5 where SC 1.4.3 wants 4.5,
# placeholders 3.5, borders of fields 1.9 where SC 1.4.11 wants 3, black arrows on dark lists, and
# hardly a sign of where the keyboard's focus is. In a narrow window there is no room
# for tabs of one width in one row.
STYLE = f"""<style>
.jupyter-widgets.{CLASS} {{
  --jp-widgets-input-border-color: {_GREY};
  --jp-widgets-input-focus-border-color: var(--jp-brand-color1, {_GREY});
}}
.jupyter-widgets.{CLASS} ::placeholder {{
  color: var(--jp-ui-font-color2, {_GREY});
}}
.jupyter-widgets.{CLASS} .widget-tab > .lm-TabBar .lm-TabBar-tab {{
  color: var(--jp-ui-font-color1, inherit);
  flex: 1 0 auto;
}}
.jupyter-widgets.{CLASS} .widget-tab > .lm-TabBar > .lm-TabBar-content {{
  flex-wrap: wrap;
}}
.jupyter-widgets.{CLASS} .widget-dropdown > select {{
  background-image: url("{_ARROW}");
}}
.jupyter-widgets.{CLASS} :is(button, input, select, textarea, .lm-TabBar-tab):focus-visible {{
  outline: 2px solid var(--jp-brand-color1, {_GREY}) !important;
  outline-offset: 1px;
}}
</style>"""

# --- links ---
# The dashboards that a panel opens, why it cannot, and what it says of those it opened.


LINKS = {
    "dashboard": (
        "Open optuna-dashboard",
        "Start optuna-dashboard on the sweep that is watched; it follows the sweep",
    ),
    "mlflow": ("Open MLflow", "Start the MLflow UI on what the runs have tracked; takes 10 s"),
}
"""Name -> label and tooltip."""


class Links:
    """The dashboards of a panel; used by the clock's thread alone.

    Args:
        host: where this process runs; default: detected.
    """

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or detect_host()
        self._opened: list[Dashboard] = []

    def open(self, name: str, state: State | None, checked: Checked) -> None:
        """Start one, or find it started; returns at once.

        Args:
            name: one of :data:`LINKS`.
            state: of what is watched; None: nothing is.
            checked: of the form.

        Raises:
            NbtoolkitError: it cannot be opened.
        """
        if why := self.refused(name, state, checked):
            raise DashboardError(why)
        if name == "dashboard" and state is not None:
            one = open_dashboard(state.paths.folder, wait=False, host=self._host)
        else:
            folder, uri = _tracked(state, checked)
            one = open_mlflow(folder, uri=uri, wait=False, host=self._host)
        others = [other for other in self._opened if other is not one and not other.closed]
        self._opened = [*others, one]

    def refused(self, name: str, state: State | None, checked: Checked) -> str:
        """Why one cannot be opened now; empty: it can."""
        if name == "dashboard":
            return no_dashboard(None if state is None else state.paths.folder, self._host)
        return no_mlflow(*_tracked(state, checked), self._host)

    @property
    def starting(self) -> bool:
        """Whether one does not answer yet."""
        return any(one.starting for one in self._opened)

    def html(self, state: State | None, checked: Checked) -> str:
        """Those that were opened, with address and port, and why others cannot be, as HTML."""
        reasons = {name: self.refused(name, state, checked) for name in LINKS}
        parts = [said(f"{LINKS[name][0]}: {why}") for name, why in reasons.items() if why]
        return "".join(_sentence(one) for one in self._opened) + boxed(*parts)

    def close(self) -> None:
        """End all that were opened here."""
        for one in self._opened:
            one.close()


def _tracked(state: State | None, checked: Checked) -> tuple[Path, str | None]:
    """The output folder of what is watched, or of the form, and where its runs are tracked."""
    config = checked.config or Config()
    folder = config.runtime.output_dir if state is None else state.paths.folder.parent
    return Path(folder).expanduser(), config.tracking.uri


def _sentence(one: Dashboard) -> str:
    try:
        return one._repr_html_() if one.up() else boxed(said(f"{one.name}: starting ..."))
    except DashboardError as error:
        return boxed(wrong(str(error)))


# --- rules ---
# Which buttons can be pressed, by what the folder and the form say.


BUTTONS = {
    "launch": ("Launch", "Train once with these settings, on every device"),
    "sweep": ("Sweep", "Search for the best settings; it goes on when the kernel ends"),
    "pause": ("Pause", "Finish what runs and start nothing more"),
    "go_on": ("Go on", "Take a paused or unfinished run up where it was"),
    "stop": ("Stop", "Let everything leave at its next report; Go on takes it up again"),
    "add_trials": ("Add trials", "Run as many more as the number beside says"),
    "stop_trial": ("Stop trial", "Let the trial of the number beside end at its next report"),
    "train_best": ("Train the best", "Train once with the best settings of the sweep"),
}
"""Name -> label and tooltip."""


def pressable(state: State | None, checked: Checked, starting: bool = False) -> set[str]:
    """The names of the buttons that can be pressed.

    A panel starts one thing at a time: a second press, even a fast one, finds that something runs.

    Args:
        state: of what is watched; None: nothing is.
        checked: of the form.
        starting: whether a notebook is at work whose run is not there yet.
    """
    if starting:
        return {"stop"}
    free = state is None or not state.live
    names = {
        "launch": free and checked.config is not None,
        "sweep": free and checked.sweep_config is not None,
    }
    if state is not None:
        lost = state.gone or bool(state.unreadable)
        going = state.kind == "sweep" and state.live
        ended = isinstance(state.table, SweepTable) and state.ended is not None
        names |= {
            "pause": state.kind != "run" and state.status == "running",
            "go_on": state.status == "paused" or state.unfinished,
            "stop": state.live,
            "add_trials": going,
            "stop_trial": going,
            "train_best": ended and not lost and bool(_best(state)),
        }
    return {name for name, can in names.items() if can}


def why_not(name: str, state: State | None, checked: Checked, starting: bool) -> str:
    """Why nothing can be started now, to follow a sentence; empty: there is no telling.

    Args:
        name: the button's.
        state: see :func:`pressable`.
        checked: the same.
        starting: the same.
    """
    if name not in ("launch", "sweep"):
        return ""
    if starting:
        return ": a notebook is starting"
    if state is not None and state.live:
        return f": {state.paths.run_id} is {state.status}; watch(None) leaves it running"
    wrong = [f"{setting}: {text}" for setting, text in checked.errors.items()]
    wrong += [text for text in (checked.together, checked.space_error) if text]
    if not wrong and name == "sweep" and checked.sweep_config is None:
        wrong = ["there is no space to search"]
    return "".join(f": {text}" for text in wrong[:1])


def _best(state: State) -> bool:
    return isinstance(state.table, SweepTable) and bool(state.table.best)


# --- board ---


TABS = ("Overview", "Trials", "Curves", "Devices", "Log", "Settings", "Search", "Files", "Links")
"""The pages, in their order."""

# By weight, not by colour: JupyterLab's orange has a contrast of 2.7 to its label, AA wants 4.5.
_FIRST = ("launch", "sweep")

_CLOSE = {"description_width": "initial"}  # a label as wide as it is
_WRAPPED = {"flex_flow": "row wrap", "grid_gap": "0 10px"}  # wrapped in a narrow window


class Board:
    """All widgets of a panel.

    Args:
        form: the settings' widgets.

    Attributes:
        buttons: by the names of :data:`~nbtoolkit.panel.board.BUTTONS`.
        links: by the names of :data:`~nbtoolkit.panel.board.LINKS`.
        pages: title -> the HTML widget that a view is written into.
        root: what is displayed.
    """

    def __init__(self, form: Form) -> None:
        import ipywidgets as w

        self.form = form
        self.plan, self.message = w.HTML(), w.HTML()
        self.buttons: dict[str, Any] = {
            name: w.Button(
                description=label,
                tooltip=tooltip,
                disabled=True,
                style={"font_weight": "bold" if name in _FIRST else "normal"},
                layout=w.Layout(width="auto"),
            )
            for name, (label, tooltip) in BUTTONS.items()
        }
        self.more = _count("more", 5, low=1, high=100_000)
        self.number = _count("trial", 0, low=0, high=1_000_000)
        self.run = w.Dropdown(
            options=[("(none)", "")],
            description="watch",
            tooltip="Which run of the output folder is watched",
            style=_CLOSE,
            layout=w.Layout(width="520px", max_width="99%"),
        )
        self._make_pages()
        above = self._above()
        pages = [w.VBox([*above.get(name, []), self.pages[name]]) for name in TABS]
        self.tabs = w.Tab(pages, titles=TABS)
        style = w.HTML(STYLE, layout=w.Layout(display="none"))
        self.root = w.VBox([style, self.plan, *self._bars(), self.message, self.run, self.tabs])
        self.root.add_class(CLASS)

    @property
    def page(self) -> str:
        """The title of the page that is seen."""
        return TABS[self.tabs.selected_index or 0]

    def _bars(self) -> list[Any]:
        import ipywidgets as w

        b = self.buttons
        first = [b[name] for name in ("launch", "sweep", "pause", "go_on", "stop", "train_best")]
        second = [self.more, b["add_trials"], self.number, b["stop_trial"]]
        return [w.HBox(first, layout=_WRAPPED), w.HBox(second, layout=_WRAPPED)]

    def _make_pages(self) -> None:
        import ipywidgets as w

        self.pages = {name: w.HTML() for name in TABS}
        self.sort = w.Dropdown(options=["trial"], description="sort by", style=_CLOSE)
        self.down = w.Checkbox(
            value=True, description="largest first", indent=False, layout=w.Layout(width="auto")
        )
        self.part = _count("page", 1, low=1, high=1)
        self.log = w.Dropdown(options=[], description="log of", style=_CLOSE)
        self.file = w.Text(
            value="config.yaml",
            description="file",
            tooltip="A YAML file of settings",
            style=_CLOSE,
            layout=w.Layout(width="520px"),
        )
        self.load = w.Button(description="Load", tooltip="Read the settings from the file")
        self.save = w.Button(description="Save", tooltip="Write the settings to the file")
        auto = w.Layout(width="auto")
        self.links: dict[str, Any] = {
            name: w.Button(description=label, tooltip=tooltip, disabled=True, layout=auto)
            for name, (label, tooltip) in LINKS.items()
        }

    def _above(self) -> dict[str, list[Any]]:
        """What stands above the view, by page."""
        import ipywidgets as w

        return {
            "Trials": [w.HBox([self.sort, self.down, self.part], layout=_WRAPPED)],
            "Log": [self.log],
            "Settings": [self.form.settings],
            "Search": [self.form.search],
            "Files": [w.HBox([self.file, self.load, self.save])],
            "Links": [w.HBox([*self.links.values()], layout=_WRAPPED)],
        }


def _count(label: str, value: int, *, low: int, high: int) -> Any:
    """A field for a whole number, as wide as it needs to be."""
    import ipywidgets as w

    return w.BoundedIntText(
        value=value,
        min=low,
        max=high,
        description=label,
        style=_CLOSE,
        layout=w.Layout(width="150px"),
    )


def close(widget: Any) -> None:
    """Close a widget and all that is in it or belongs to it: ipywidgets keeps each it made."""
    parts = [*getattr(widget, "children", ())]
    parts += [getattr(widget, name) for name in ("layout", "style") if widget.has_trait(name)]
    for part in parts:
        if part is not None:
            close(part)
    widget.close()
