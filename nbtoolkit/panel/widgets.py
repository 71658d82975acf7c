"""Make and update buttons, labels, rows, texts, and sections that open and close."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ipywidgets as w

from nbtoolkit.views.markup import paragraph, view

SIGNS = {"stop": "■ Stop", "reset": "↺", "remove": "✕", "previous": "◀", "next": "▶"}
"""What a button shows instead of its name, by kind; the panel's style draws it."""

HIDDEN, INVISIBLE = "nbtoolkit-hidden", "nbtoolkit-invisible"
"""CSS classes of widgets that take no room, and of those that only are not seen."""

# --- updates ---


def set_trait(widget: w.Widget, name: str, value: object) -> None:
    """Set a widget's trait if it differs, since each change is a message to the browser."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def show(widget: w.Widget, visible: bool, css_class: str = HIDDEN) -> None:
    """Show a widget, or hide it: by a class, since it shares its layout with others."""
    (widget.remove_class if visible else widget.add_class)(css_class)


def set_html(widget: w.HTML, html: str) -> None:
    """Set an HTML widget's value; an empty one takes no room."""
    set_trait(widget, "value", html)
    show(widget, bool(html))


def set_text(widget: w.HTML, text: str, render: Callable[[str], str] = paragraph) -> None:
    """Show a text, as a paragraph or as ``render`` says; an empty one takes no room."""
    set_html(widget, view(render(text)) if text else "")


def walk(widget: w.Widget) -> Iterator[w.Widget]:
    """Yield a widget and all in it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


@contextmanager
def batched(root: w.Widget) -> Iterator[None]:
    """Send the changes of each widget in ``root`` as one message, at the end of the block.

    The browser handles one message after another, and lays the page out anew after many of them.
    """
    with ExitStack() as stack:
        for widget in walk(root):
            stack.enter_context(widget.hold_sync())
        yield


# --- widgets ---

SHARED: dict[tuple[type[w.Widget], tuple[tuple[str, str], ...]], w.Widget] = {}
"""The layouts and styles made so far, which outlive every panel, by class and traits."""


def shared(kind: type[w.Widget], **traits: str) -> w.Widget:
    """Return the layout or style with these traits, which no widget changes.

    The browser makes one model after another. A layout and a style for each widget would be two
    thirds of all models.

    Args:
        kind: its class.
        traits: its traits.
    """
    key = kind, (*sorted(traits.items()),)
    made = SHARED.get(key)
    if made is None or made.comm is None:  # ipywidgets.Widget.close_all() has closed it
        made = SHARED[key] = kind(**traits)
    return made


def make(
    kind: type[w.Widget],
    layout: Mapping[str, str] | None = None,
    style: Mapping[str, str] | None = None,
    **traits: Any,
) -> Any:
    """Make a widget with a shared layout and style.

    Args:
        kind: its class.
        layout: traits of its layout.
        style: traits of its style, if it has one.
        traits: its other traits; ``_dom_classes`` are its CSS classes, since a class that is added
            later costs a message.
    """
    if "style" in kind.class_trait_names():
        traits["style"] = shared(kind.style.klass, **style or {})
    return kind(layout=shared(w.Layout, **layout or {}), **traits)


def labelled(
    kind: type[w.Widget], name: str, layout: Mapping[str, str] | None = None, **traits: Any
) -> Any:
    """Make a field with a label as wide as its text; the arguments are those of :func:`make`."""
    style = {"description_width": "initial"}
    return make(kind, {"max_width": "99%", **(layout or {})}, style, description=name, **traits)


def html(value: str = "", **layout: str) -> w.HTML:
    """Make a text; an empty one is hidden, as :func:`set_html` does."""
    return make(w.HTML, layout, value=value, _dom_classes=() if value else (HIDDEN,))


def button(name: str, tooltip: str, *, bold: bool = False, **traits: Any) -> w.Button:
    """Make a button as wide as its name."""
    layout = {"width": "auto", "flex": "0 0 auto", "align_self": "flex-start"}
    style = {"font_weight": "bold" if bold else "normal"}
    return make(w.Button, layout, style, description=name, tooltip=tooltip, **traits)


def sign_button(sign: str, name: str, *, visible: bool = True, **layout: str) -> w.Button:
    """Make a button that shows one of :data:`SIGNS`; screen readers read its name."""
    layout, style = {"width": "34px", **layout}, {"font_weight": "normal"}
    classes = ("nbtoolkit-sign", f"nbtoolkit-{sign}", *(() if visible else (INVISIBLE,)))
    return make(w.Button, layout, style, description=name, tooltip=name, _dom_classes=classes)


def column(*widgets: w.Widget, **layout: str) -> w.VBox:
    """Place widgets below each other."""
    return make(w.VBox, layout, children=widgets)


def wrapped_row(
    *widgets: w.Widget, gap: str = "0 10px", align: str = "center", **traits: Any
) -> w.HBox:
    """Place widgets beside each other, or below each other in a narrow window."""
    layout = {"flex_flow": "row wrap", "grid_gap": gap, "align_items": align}
    return make(w.HBox, layout, children=widgets, **traits)


def close_widget(widget: w.Widget) -> None:
    """Close a widget with its children, layout and style; ipywidgets keeps a list of them all."""
    parts = [*getattr(widget, "children", ())]
    parts += [getattr(widget, name) for name in ("layout", "style") if widget.has_trait(name)]
    for part in parts:
        if part is not None and part not in SHARED.values():
            close_widget(part)
    widget.close()


class Sections:
    """Sections below each other, of which at most one is open.

    The headings are buttons, which the keyboard reaches. Those of ipywidgets' Accordion are not.
    The browser draws the open section only.

    Args:
        contents: the widgets of each section, by title.
        on_open: called with the title of a section before it opens.

    Attributes:
        root: the widget.
        headings: the buttons by title.
        opened: the title of the open section; empty: none is open.
    """

    def __init__(
        self,
        contents: Mapping[str, Sequence[w.Widget]],
        on_open: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.opened, self._contents, self._on_open = "", contents, on_open
        self.headings = {title: button(f"▸ {title}", f"Open {title}") for title in contents}
        for title, heading in self.headings.items():
            heading.on_click(
                lambda _, title=title: self.open("" if title == self.opened else title)
            )
        self._row = wrapped_row(*self.headings.values(), gap="0")
        self.root = column(self._row)

    def open(self, title: str) -> None:
        """Open a section and close the others; empty: close all."""
        if title:
            self._on_open(title)
        self.opened = title
        set_trait(self.root, "children", (self._row, *self._contents.get(title, ())))
        for name, heading in self.headings.items():
            is_open = name == title
            set_trait(heading, "description", f"{'▾' if is_open else '▸'} {name}")
            set_trait(heading, "tooltip", f"{'Close' if is_open else 'Open'} {name}")

    def close(self) -> None:
        """Close the widgets of all sections."""
        for widgets in (*self._contents.values(), [self.root]):
            for widget in widgets:
                close_widget(widget)
