"""Lay out the panel's widgets, its links to dashboards, and the rules for its buttons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.config.schema import Config
from nbtoolkit.dashboards.mlflow_server import mlflow_unavailable, open_mlflow
from nbtoolkit.dashboards.server import Dashboard
from nbtoolkit.dashboards.study_dashboard import dashboard_unavailable, open_dashboard
from nbtoolkit.errors import DashboardError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.panel.form import Form, Validation
from nbtoolkit.study.table import SweepTable
from nbtoolkit.views.markup import alert, paragraph, view
from nbtoolkit.views.state import State

if TYPE_CHECKING:
    import ipywidgets

# --- style ---

CLASS = "nbtoolkit-panel"
"""The CSS class of the panel's outermost widget."""

# A grey whose contrast is above 3 on white (4.5) and on the dark theme's background (4.2).
_GREY = "#767676"

_ARROW = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='%23808080' stroke-width='2'/%3E%3C/svg%3E"
)

# What stock widgets lack (contrasts by WCAG 2.2): labels of tabs have 4.2 to 4.5 where SC 1.4.3
# wants 4.5, placeholders 3.5, borders of fields 1.9 where SC 1.4.11 wants 3; dark lists have black
# arrows; the keyboard's focus is hardly visible. In a narrow window, tabs of one width do not fit
# in one row.
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

LINKS = {
    "dashboard": (
        "Open optuna-dashboard",
        "Start optuna-dashboard on the sweep that is watched; it follows the sweep",
    ),
    "mlflow": ("Open MLflow", "Start the MLflow UI on what the runs have tracked; takes 10 s"),
}
"""Label and tooltip of each link, by name."""


class Links:
    """The dashboards that a panel opens; used by the panel's thread alone.

    Args:
        host: where this process runs; default: detected.
    """

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or detect_host()
        self._opened: list[Dashboard] = []

    def open(self, name: str, state: State | None, validation: Validation) -> None:
        """Open a dashboard; returns at once.

        Args:
            name: one of :data:`LINKS`.
            state: of the watched run; None: none is watched.
            validation: of the form.

        Raises:
            NbtoolkitError: it cannot be opened.
        """
        if reason := self.unavailable(name, state, validation):
            raise DashboardError(reason)
        if name == "dashboard" and state is not None:
            opened = open_dashboard(state.paths.folder, wait=False, host=self._host)
        else:
            folder, uri = _tracking(state, validation)
            opened = open_mlflow(folder, uri=uri, wait=False, host=self._host)
        others = [other for other in self._opened if other is not opened and not other.closed]
        self._opened = [*others, opened]

    def unavailable(self, name: str, state: State | None, validation: Validation) -> str:
        """Return why a dashboard cannot be opened now; empty: it can."""
        if name == "dashboard":
            return dashboard_unavailable(None if state is None else state.paths.folder, self._host)
        return mlflow_unavailable(*_tracking(state, validation), self._host)

    @property
    def starting(self) -> bool:
        """Whether one of them does not answer yet."""
        return any(dashboard.starting for dashboard in self._opened)

    def html(self, state: State | None, validation: Validation) -> str:
        """Render the opened dashboards with address and port, and why others are unavailable."""
        reasons = {name: self.unavailable(name, state, validation) for name in LINKS}
        lines = [f"{LINKS[name][0]}: {reason}" for name, reason in reasons.items() if reason]
        return "".join(map(_dashboard_html, self._opened)) + view(*map(paragraph, lines))

    def close(self) -> None:
        """Close all that were opened here."""
        for dashboard in self._opened:
            dashboard.close()


def _tracking(state: State | None, validation: Validation) -> tuple[Path, str | None]:
    """Return the output folder of the watched run, or of the form, and the tracking URI."""
    config = validation.config or Config()
    folder = config.runtime.output_dir if state is None else state.paths.folder.parent
    return Path(folder).expanduser(), config.tracking.uri


def _dashboard_html(dashboard: Dashboard) -> str:
    try:
        if dashboard.up():
            return dashboard._repr_html_()
        return view(paragraph(f"{dashboard.name}: starting ..."))
    except DashboardError as error:
        return view(alert(str(error)))


# --- buttons ---

BUTTONS = {
    "launch": ("Launch", "Train once with these settings, on every device"),
    "sweep": ("Sweep", "Search for the best settings; continues when the kernel ends"),
    "pause": ("Pause", "Finish what runs and start nothing more"),
    "go_on": ("Go on", "Resume a paused or unfinished run"),
    "stop": ("Stop", "Stop everything at its next report; Go on resumes it"),
    "add_trials": ("Add trials", "Run as many more as the number beside says"),
    "stop_trial": ("Stop trial", "Stop the trial of the number beside at its next report"),
    "train_best": ("Train the best", "Train once with the best settings of the sweep"),
}
"""Label and tooltip of each button, by name."""


def enabled_buttons(
    state: State | None, validation: Validation, starting: bool = False
) -> set[str]:
    """Return the names of the buttons that can be pressed.

    A panel starts one thing at a time, so that a second press, however fast, starts nothing.

    Args:
        state: of the watched run; None: none is watched.
        validation: of the form.
        starting: whether a notebook was started whose run does not exist yet.
    """
    if starting:
        return {"stop"}
    idle = state is None or not state.live
    enabled = {
        "launch": idle and validation.config is not None,
        "sweep": idle and validation.sweep_config is not None,
    }
    if state is not None:
        best = state.table.best if isinstance(state.table, SweepTable) else []
        lost = state.gone or bool(state.unreadable)
        live_sweep = state.kind == "sweep" and state.live
        enabled |= {
            "pause": state.kind != "run" and state.status == "running",
            "go_on": state.status == "paused" or state.resumable,
            "stop": state.live,
            "add_trials": live_sweep,
            "stop_trial": live_sweep,
            "train_best": bool(best) and state.ended is not None and not lost,
        }
    return {name for name, is_enabled in enabled.items() if is_enabled}


def disabled_reason(name: str, state: State | None, validation: Validation, starting: bool) -> str:
    """Return why nothing can be started now, to follow a sentence; empty for other buttons.

    Args:
        name: the button's.
        state: as for :func:`enabled_buttons`.
        validation: as for :func:`enabled_buttons`.
        starting: as for :func:`enabled_buttons`.
    """
    if name not in ("launch", "sweep"):
        return ""
    if starting:
        return ": a notebook is starting"
    if state is not None and state.live:
        return f": {state.paths.run_id} is {state.status}; watch(None) leaves it running"
    reasons = [f"{setting}: {text}" for setting, text in validation.errors.items()]
    reasons += [text for text in (validation.together, validation.space_error) if text]
    if not reasons and name == "sweep" and validation.sweep_config is None:
        reasons = ["there is no space to search"]
    return f": {reasons[0]}" if reasons else ""


# --- widgets ---

TABS = ("Overview", "Trials", "Curves", "Devices", "Log", "Settings", "Search", "Files", "Links")
"""The titles of the pages, in order."""

# By weight, not by colour: JupyterLab's orange has a contrast of 2.7 to its label, AA wants 4.5.
_BOLD = ("launch", "sweep")

_AUTO_LABEL = {"description_width": "initial"}  # a label as wide as its text
_WRAPPED_ROW = {"flex_flow": "row wrap", "grid_gap": "0 10px"}  # wraps in a narrow window


class Board:
    """All widgets of a panel.

    Args:
        form: the settings' widgets.

    Attributes:
        buttons: by the names of :data:`~nbtoolkit.panel.board.BUTTONS`.
        links: by the names of :data:`~nbtoolkit.panel.board.LINKS`.
        pages: the HTML widget of each page's view, by title.
        root: the widget that is displayed.
    """

    def __init__(self, form: Form) -> None:
        import ipywidgets as w

        self.form = form
        self.plan, self.message = w.HTML(), w.HTML()
        self.buttons: dict[str, ipywidgets.Button] = {
            name: w.Button(
                description=label,
                tooltip=tooltip,
                disabled=True,
                style={"font_weight": "bold" if name in _BOLD else "normal"},
                layout=w.Layout(width="auto"),
            )
            for name, (label, tooltip) in BUTTONS.items()
        }
        self.more = _number_field("more", 5, low=1, high=100_000)
        self.number = _number_field("trial", 0, low=0, high=1_000_000)
        self.run = w.Dropdown(
            options=[("(none)", "")],
            description="watch",
            tooltip="Which run of the output folder is watched",
            style=_AUTO_LABEL,
            layout=w.Layout(width="520px", max_width="99%"),
        )
        self._make_pages()
        controls = self._page_controls()
        pages = [w.VBox([*controls.get(name, []), self.pages[name]]) for name in TABS]
        self.tabs = w.Tab(pages, titles=TABS)
        style = w.HTML(STYLE, layout=w.Layout(display="none"))
        rows = self._button_rows()
        self.root = w.VBox([style, self.plan, *rows, self.message, self.run, self.tabs])
        self.root.add_class(CLASS)

    @property
    def page(self) -> str:
        """The title of the page that is shown."""
        return TABS[self.tabs.selected_index or 0]

    def _button_rows(self) -> list[ipywidgets.HBox]:
        import ipywidgets as w

        names = ("launch", "sweep", "pause", "go_on", "stop", "train_best")
        first = [self.buttons[name] for name in names]
        second = [self.more, self.buttons["add_trials"], self.number, self.buttons["stop_trial"]]
        return [w.HBox(first, layout=_WRAPPED_ROW), w.HBox(second, layout=_WRAPPED_ROW)]

    def _make_pages(self) -> None:
        import ipywidgets as w

        auto = w.Layout(width="auto")
        self.pages = {name: w.HTML() for name in TABS}
        self.sort = w.Dropdown(options=["trial"], description="sort by", style=_AUTO_LABEL)
        self.down = w.Checkbox(value=True, description="largest first", indent=False, layout=auto)
        self.part = _number_field("page", 1, low=1, high=1)
        self.log = w.Dropdown(options=[], description="log of", style=_AUTO_LABEL)
        self.file = w.Text(
            value="config.yaml",
            description="file",
            tooltip="A YAML file of settings",
            style=_AUTO_LABEL,
            layout=w.Layout(width="520px"),
        )
        self.load = w.Button(description="Load", tooltip="Read the settings from the file")
        self.save = w.Button(description="Save", tooltip="Write the settings to the file")
        self.links: dict[str, ipywidgets.Button] = {
            name: w.Button(description=label, tooltip=tooltip, disabled=True, layout=auto)
            for name, (label, tooltip) in LINKS.items()
        }

    def _page_controls(self) -> dict[str, list[ipywidgets.Widget]]:
        """Return the controls above a page's view, by title."""
        import ipywidgets as w

        return {
            "Trials": [w.HBox([self.sort, self.down, self.part], layout=_WRAPPED_ROW)],
            "Log": [self.log],
            "Settings": [self.form.settings],
            "Search": [self.form.search],
            "Files": [w.HBox([self.file, self.load, self.save])],
            "Links": [w.HBox([*self.links.values()], layout=_WRAPPED_ROW)],
        }


def _number_field(label: str, value: int, *, low: int, high: int) -> ipywidgets.BoundedIntText:
    import ipywidgets as w

    return w.BoundedIntText(
        value=value,
        min=low,
        max=high,
        description=label,
        style=_AUTO_LABEL,
        layout=w.Layout(width="150px"),
    )
