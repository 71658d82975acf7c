"""Form: the widgets of a draft: a field for each setting, with its error beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtoolkit.panel.draft import Checked, Draft
from nbtoolkit.panel.fields import GENERAL, Field, config_fields
from nbtoolkit.views.markup import boxed, wrong

if TYPE_CHECKING:
    from ipywidgets import Widget

_FIRST = "train"  # what is changed most often
_SHORT = {"description_width": "50px"}  # for labels of one word


class Form:
    """Widgets over a draft; what is typed stands in the draft at once, right or wrong.

    A section's widgets are made when it is first looked at: 75 settings at once would take the
    browser a second.

    Args:
        draft: what is edited.
        changed: called, in whatever thread, when something was typed.
    """

    def __init__(self, draft: Draft, changed: Callable[[], None]) -> None:
        import ipywidgets as w

        self.draft, self._changed = draft, changed
        self._fields = config_fields()
        self._inputs: dict[str, Any] = {}
        self._errors: dict[str, Any] = {}
        self._rows: dict[str, list[Widget]] = {}
        self._style = {"description_width": "210px"}
        firm = {"max_width": "99%", "flex": "0 0 auto"}  # an error beside takes no room away
        self._narrow, self._wide = w.Layout(width="420px", **firm), w.Layout(width="640px", **firm)
        self._beside = w.Layout(min_width="200px", flex="1 1 0")
        # A section is made in the kernel's thread while the panel's shows errors or loads a file.
        self._lock, self._loading = threading.RLock(), False
        self.together = w.HTML()
        sections = list(dict.fromkeys(field.section for field in self._fields.values()))
        sections.remove(GENERAL)
        self.section = w.Dropdown(
            options=[*sections, GENERAL],
            value=_FIRST,
            description="section",
            tooltip="Which settings are shown",
            style=self._style,
            layout=self._narrow,
        )
        self.section.observe(lambda _: self._show(), "value")
        self._shown = w.VBox()
        self.space = w.Textarea(
            value=draft.space,
            description="space",
            tooltip="What is searched, as YAML: names of settings, each with its limits",
            placeholder="optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}",
            rows=14,
            style=_SHORT,
            layout=self._wide,
        )
        self.trials = w.Text(
            value=draft.trials,
            description="trials",
            tooltip="How many in all; empty: as the space says",
            style=_SHORT,
            layout=self._narrow,
        )
        self.space_error = w.HTML()
        self.space.observe(lambda change: self._type_space(change["new"], None), "value")
        self.trials.observe(lambda change: self._type_space(None, change["new"]), "value")
        self.settings = w.VBox([self.section, self.together, self._shown])
        self.search = w.VBox([self.trials, self.space, self.space_error])
        self._show()

    def load(self, draft: Draft) -> None:
        """Put another draft in place of this one."""
        with self._lock:
            self.draft, self._loading = draft, True
            try:
                for name, widget in self._inputs.items():
                    widget.value = draft.texts[name]
                self.space.value, self.trials.value = draft.space, draft.trials
            finally:
                self._loading = False

    def show(self, checked: Checked) -> None:
        """Show what is wrong, each beside its field."""
        with self._lock:
            beside, shown = dict(self._errors), self.section.value
        for name, html in beside.items():
            _put(html, boxed(wrong(checked.errors[name])) if name in checked.errors else "")
        # A field of a section that was left has its error beside it, where nobody sees it.
        unseen = [name for name in checked.errors if self._fields[name].section != shown]
        told = checked.together
        if unseen:
            told = "\n".join(
                f"{name} (section {self._fields[name].section}): {checked.errors[name]}"
                for name in unseen
            )
        _put(self.together, boxed(wrong(told)) if told else "")
        _put(self.space_error, boxed(wrong(checked.space_error)) if checked.space_error else "")

    @property
    def rows(self) -> list[Widget]:
        """Every row made so far, of sections that are not shown too."""
        return [row for rows in self._rows.values() for row in rows]

    def input(self, name: str) -> Any:
        """The widget of a setting; its section is shown."""
        self.section.value = self._fields[name].section
        return self._inputs[name]

    def error(self, name: str) -> str:
        """What stands beside a setting, as HTML."""
        return str(self._errors[name].value)

    def _show(self) -> None:
        with self._lock:
            section = self.section.value
            if section not in self._rows:
                fields = [one for one in self._fields.values() if one.section == section]
                self._rows[section] = [self._row(one) for one in fields]
            self._shown.children = self._rows[section]
        self._changed()  # errors of fields that were not there yet

    def _row(self, field: Field) -> Widget:
        import ipywidgets as w

        self._inputs[field.name] = widget = self._input(field)
        self._errors[field.name] = error = w.HTML(layout=self._beside)
        widget.observe(lambda change: self._type(field.name, change["new"]), "value")
        return w.HBox([widget, error], layout={"flex_flow": "row wrap"})  # narrow: below it

    def _input(self, field: Field) -> Any:
        import ipywidgets as w

        text = self.draft.texts[field.name]
        common: dict[str, Any] = {
            "value": text,
            "description": field.name.removeprefix(f"{field.section}."),
            "tooltip": field.tooltip,
            "style": self._style,
        }
        if field.free:
            return w.Textarea(**common, rows=5, layout=self._wide, placeholder="name: value")
        if field.choices:
            known = text in field.choices
            options = field.choices if known else (text, *field.choices)
            return w.Dropdown(**common, options=options, layout=self._narrow)
        return w.Text(**common, layout=self._narrow, placeholder=field.allowed)

    def _type(self, name: str, text: str) -> None:
        with self._lock:
            if self._loading:
                return
            self.draft.texts[name] = text
        self._changed()

    def _type_space(self, space: str | None, trials: str | None) -> None:
        with self._lock:
            if self._loading:
                return
            self.draft.space = self.draft.space if space is None else space
            self.draft.trials = self.draft.trials if trials is None else trials
        self._changed()


def _put(html: Any, text: str) -> None:
    """Give a widget a text if it is another one: each change is a message to the browser."""
    if html.value != text:
        html.value = text
