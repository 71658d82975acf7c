"""Make and update buttons, labels, rows, texts, and sections that open and close."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as w

from nbtoolkit.views.markup import paragraph, view

SIGNS = {"stop": "■", "reset": "↺", "remove": "✕", "previous": "◀", "next": "▶"}
"""What a button shows instead of its name, by kind; the panel's style draws it."""


def set_trait(widget: w.Widget, name: str, value: object) -> None:
    """Set a widget's trait if it differs, since each change is a message to the browser."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def show(widget: w.Widget, visible: bool) -> None:
    """Show a widget, or take it out of the layout."""
    set_trait(widget.layout, "display", None if visible else "none")


def set_html(widget: w.HTML, html: str) -> None:
    """Set an HTML widget's value; an empty one takes no room."""
    set_trait(widget, "value", html)
    show(widget, bool(html))


def set_text(widget: w.HTML, text: str, render: Callable[[str], str] = paragraph) -> None:
    """Show a text, as a paragraph or as ``render`` says; an empty one takes no room."""
    set_html(widget, view(render(text)) if text else "")


def label(text: str, **layout: str) -> dict[str, Any]:
    """Return the traits of a field with a label as wide as its text."""
    style = {"description_width": "initial"}
    return {"description": text, "style": style, "layout": {"max_width": "99%", **layout}}


@functools.lru_cache(maxsize=1)
def _shared_styles() -> dict[str, w.Widget]:
    """Styles that all texts and buttons share.

    Each widget would send one of its own to the browser: a quarter of the panel's messages.
    """
    return {
        "html": w.HTML().style,
        "normal": w.ButtonStyle(font_weight="normal"),
        "bold": w.ButtonStyle(font_weight="bold"),
    }


def html(value: str = "", **layout: str) -> w.HTML:
    """Make a text."""
    return w.HTML(value, style=_shared_styles()["html"], layout=layout)


def button(name: str, tooltip: str, *, bold: bool = False) -> w.Button:
    """Make a button as wide as its name."""
    style = _shared_styles()["bold" if bold else "normal"]
    layout = {"width": "auto", "flex": "0 0 auto", "align_self": "flex-start"}
    return w.Button(description=name, tooltip=tooltip, style=style, layout=layout)


def sign_button(sign: str, name: str, **layout: str) -> w.Button:
    """Make a button that shows one of :data:`SIGNS`; screen readers read its name."""
    style = _shared_styles()["normal"]
    made = w.Button(description=name, tooltip=name, style=style, layout={"width": "34px", **layout})
    made.add_class("nbtoolkit-sign")
    made.add_class(f"nbtoolkit-{sign}")
    return made


def wrapped_row(*widgets: w.Widget, gap: str = "0 10px") -> w.HBox:
    """Place widgets beside each other, or below each other in a narrow window."""
    layout = {"flex_flow": "row wrap", "grid_gap": gap, "align_items": "center"}
    return w.HBox(widgets, layout=layout)


def close_widget(widget: w.Widget) -> None:
    """Close a widget with its children, layout and style; ipywidgets keeps a list of them all."""
    parts = [*getattr(widget, "children", ())]
    parts += [getattr(widget, name) for name in ("layout", "style") if widget.has_trait(name)]
    for part in parts:
        if part is not None and part not in _shared_styles().values():
            close_widget(part)
    widget.close()


class Sections:
    """Sections below each other, of which at most one is open.

    The headings are buttons, which the keyboard reaches. Those of ipywidgets' Accordion are not.

    Args:
        contents: the sections by title.

    Attributes:
        root: the widget.
        headings: the buttons by title.
        opened: the title of the open section; empty: none is open.
    """

    def __init__(self, contents: Mapping[str, w.Widget]) -> None:
        self.opened, self._contents = "", contents
        self.headings = {title: button(title, "") for title in contents}
        for title, heading in self.headings.items():
            heading.on_click(
                lambda _, title=title: self.open("" if title == self.opened else title)
            )
        self.root = w.VBox([wrapped_row(*self.headings.values(), gap="0"), *contents.values()])
        self.open("")

    def open(self, title: str) -> None:
        """Open a section and close the others; empty: close all."""
        self.opened = title
        for name, content in self._contents.items():
            is_open = name == title
            show(content, is_open)
            set_trait(self.headings[name], "description", f"{'▾' if is_open else '▸'} {name}")
            set_trait(self.headings[name], "tooltip", f"{'Close' if is_open else 'Open'} {name}")
