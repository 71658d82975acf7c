"""Board: the widgets of a panel and how they are laid out; core widgets only, all with a label."""

from __future__ import annotations

from typing import Any

from nbtoolkit.panel.form import Form
from nbtoolkit.panel.links import LINKS
from nbtoolkit.panel.rules import BUTTONS
from nbtoolkit.panel.style import CLASS, STYLE

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
        buttons: by the names of :data:`~nbtoolkit.panel.rules.BUTTONS`.
        links: by the names of :data:`~nbtoolkit.panel.links.LINKS`.
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
