"""Make and update the widgets of the panel; a style sheet gives them what stock widgets lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as w

from nbtoolkit.cards import Card, Text, html

HIDDEN = "nbtoolkit-hidden"
"""The CSS class of widgets that are not shown."""

CLASS = "nbtoolkit-panel"
"""The CSS class of the panel's outermost widget."""

# A grey whose contrast is above 3 on white (4.5) and on the dark theme's background (4.2).
_GREY = "#767676"

_ARROW = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='%23808080' stroke-width='2'/%3E%3C/svg%3E"
)

# What stock widgets lack (contrasts by WCAG 2.2): placeholders have less than 4.5 (SC 1.4.3),
# borders of fields 1.9 where SC 1.4.11 wants 3; dark lists have black arrows; the keyboard's focus
# is hardly visible. The last rules hide widgets, and the page for saved notebooks while the
# widgets are alive.
STYLE = f"""<style>
.jupyter-widgets.{CLASS} {{
  color: var(--jp-ui-font-color1, inherit);
  --jp-widgets-input-border-color: {_GREY};
  --jp-widgets-input-focus-border-color: var(--jp-brand-color1, {_GREY});
}}
.jupyter-widgets.{CLASS} ::placeholder {{ color: var(--jp-ui-font-color2, {_GREY}); }}
.jupyter-widgets.{CLASS} .widget-dropdown > select {{ background-image: url("{_ARROW}"); }}
.jupyter-widgets.{CLASS} .widget-html-content {{ line-height: normal; min-width: 0; }}
.jupyter-widgets.{CLASS} :is(button, input, select, textarea):focus-visible {{
  outline: 2px solid var(--jp-brand-color1, {_GREY}) !important;
  outline-offset: 1px;
}}
.jupyter-widgets.{CLASS} .{HIDDEN}, .SAVED {{ display: none; }}
</style>"""


def set_trait(widget: w.Widget, name: str, value: object) -> None:
    """Set a widget's trait if it differs, since each change is a message to the browser."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def show(widget: w.Widget, visible: bool) -> None:
    """Show a widget, or hide it."""
    (widget.remove_class if visible else widget.add_class)(HIDDEN)


def set_html(widget: w.HTML, value: str) -> None:
    """Set an HTML widget's value; an empty one takes no room."""
    set_trait(widget, "value", value)
    show(widget, bool(value))


def set_error(widget: w.HTML, text: str) -> None:
    """Show an error; an empty one takes no room."""
    set_html(widget, html([Card("", [Text(text, "alert")], span=4)]) if text else "")


def set_text(widget: w.HTML, text: str) -> None:
    """Show a text; an empty one takes no room."""
    set_html(widget, html([Card("", [Text(text)], span=4)]) if text else "")


def labelled(
    kind: type[w.Widget], name: str, layout: Mapping[str, str] | None = None, **traits: Any
) -> Any:
    """Make a field with a label as wide as its text."""
    style = {"description_width": "initial"}
    return kind(
        description=name, style=style, layout={"max_width": "99%", **(layout or {})}, **traits
    )


def html_widget(**layout: str) -> w.HTML:
    """Make an empty text, which is hidden."""
    widget = w.HTML(layout={"width": "auto", "margin": "0", **layout})
    widget.add_class(HIDDEN)
    return widget


def button(
    name: str, tooltip: str, on_click: Callable[[], object], *, bold: bool = False
) -> w.Button:
    """Make a button as wide as its name."""
    layout = {"width": "auto", "flex": "0 0 auto", "align_self": "flex-start"}
    style = {"font_weight": "bold" if bold else "normal"}
    made = w.Button(description=name, tooltip=tooltip, layout=layout, style=style)
    made.on_click(lambda _: on_click())
    return made


def column(*widgets: w.Widget, **layout: str) -> w.VBox:
    """Place widgets below each other."""
    return w.VBox(widgets, layout=layout)


def row_of(*widgets: w.Widget) -> w.HBox:
    """Place widgets beside each other, or below each other in a narrow window."""
    layout = {"flex_flow": "row wrap", "grid_gap": "0 8px", "align_items": "flex-start"}
    return w.HBox(widgets, layout=layout)


def close_widget(widget: w.Widget) -> None:
    """Close a widget with its children, layout and style; ipywidgets keeps a list of them all."""
    parts = [*getattr(widget, "children", ())]
    parts += [getattr(widget, name) for name in ("layout", "style") if widget.has_trait(name)]
    for part in parts:
        if part is not None:
            close_widget(part)
    widget.close()
