"""Board: the widgets of a panel and how they are laid out; core widgets only, all with a label."""

from __future__ import annotations

from typing import Any

from nbtoolkit.panel.form import Form
from nbtoolkit.panel.rules import BUTTONS

TABS = ("Overview", "Trials", "Curves", "Devices", "Log", "Settings", "Search", "Files")
"""The pages, in their order."""

# By weight, not by colour: JupyterLab's orange has a contrast of 2.7 to its label, AA wants 4.5.
_FIRST = ("launch", "sweep")


class Board:
    """All widgets of a panel.

    Args:
        form: the settings' widgets.

    Attributes:
        buttons: by the names of :data:`~nbtoolkit.panel.rules.BUTTONS`.
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
        short = w.Layout(width="190px")
        self.more = w.BoundedIntText(value=5, min=1, max=100_000, description="more", layout=short)
        self.number = w.BoundedIntText(
            value=0, min=0, max=1_000_000, description="trial", layout=short
        )
        self.run = w.Dropdown(
            options=[("(none)", "")],
            description="watch",
            tooltip="Which run of the output folder is watched",
            layout=w.Layout(width="520px"),
        )
        self._make_pages()
        self.tabs = w.Tab([self._page(name) for name in TABS], titles=TABS)
        self.root = w.VBox([self.plan, *self._bars(), self.message, self.run, self.tabs])

    @property
    def page(self) -> str:
        """The title of the page that is seen."""
        return TABS[self.tabs.selected_index or 0]

    def _bars(self) -> list[Any]:
        import ipywidgets as w

        wrapped, b = w.Layout(flex_flow="row wrap"), self.buttons
        first = [b[name] for name in ("launch", "sweep", "pause", "go_on", "stop", "train_best")]
        second = [self.more, b["add_trials"], self.number, b["stop_trial"]]
        return [w.HBox(first, layout=wrapped), w.HBox(second, layout=wrapped)]

    def _make_pages(self) -> None:
        import ipywidgets as w

        self.pages = {name: w.HTML() for name in TABS}
        self.sort = w.Dropdown(options=["trial"], description="sort by")
        self.down = w.Checkbox(value=True, description="largest first", indent=False)
        self.part = w.BoundedIntText(
            value=1, min=1, max=1, description="page", layout=w.Layout(width="170px")
        )
        self.log = w.Dropdown(options=[], description="log of")
        self.file = w.Text(
            value="config.yaml",
            description="file",
            tooltip="A YAML file of settings",
            layout=w.Layout(width="520px"),
        )
        self.load = w.Button(description="Load", tooltip="Read the settings from the file")
        self.save = w.Button(description="Save", tooltip="Write the settings to the file")

    def _page(self, name: str) -> Any:
        import ipywidgets as w

        above: dict[str, list[Any]] = {
            "Trials": [w.HBox([self.sort, self.down, self.part])],
            "Log": [self.log],
            "Settings": [self.form.settings],
            "Search": [self.form.search],
            "Files": [w.HBox([self.file, self.load, self.save])],
        }
        return w.VBox([*above.get(name, []), self.pages[name]])
