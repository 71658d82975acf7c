"""Links: the dashboards that a panel opens, why it cannot, and what it says of those it opened."""

from __future__ import annotations

from pathlib import Path

from nbtoolkit.config import Config
from nbtoolkit.dashboards.mlflow import no_mlflow, open_mlflow
from nbtoolkit.dashboards.server import Dashboard
from nbtoolkit.dashboards.study import no_dashboard, open_dashboard
from nbtoolkit.errors import DashboardError
from nbtoolkit.panel.draft import Checked
from nbtoolkit.runtime.host import Host, detect_host
from nbtoolkit.views.markup import boxed, said, wrong
from nbtoolkit.views.state import State

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
        return "".join(_told(one) for one in self._opened) + boxed(*parts)

    def close(self) -> None:
        """End all that were opened here."""
        for one in self._opened:
            one.close()


def _tracked(state: State | None, checked: Checked) -> tuple[Path, str | None]:
    """The output folder of what is watched, or of the form, and where its runs are tracked."""
    config = checked.config or Config()
    folder = config.runtime.output_dir if state is None else state.paths.folder.parent
    return Path(folder).expanduser(), config.tracking.uri


def _told(one: Dashboard) -> str:
    try:
        return one._repr_html_() if one.up() else boxed(said(f"{one.name}: starting ..."))
    except DashboardError as error:
        return boxed(wrong(str(error)))
