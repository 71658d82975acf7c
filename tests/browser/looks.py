"""Find faults of a panel's layout: clipped, overlapping, faint, unnamed or unreachable by Tab."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator

_LOOK = Path(__file__).with_suffix(".js").read_text()

_CONTROLS = {"button", "textbox", "combobox", "spinbutton", "checkbox", "tab", "link", "slider"}

_MARK = "data-looks"


def ugly(part: Locator) -> list[str]:
    """Sentences on what is clipped, overlapping or has too little contrast below an element."""
    found: list[str] = part.evaluate(_LOOK)
    return found


def nameless(part: Locator) -> list[str]:
    """The roles of controls below an element that a screen reader could not name."""
    part.evaluate(f"e => e.setAttribute('{_MARK}', '')")
    session = part.page.context.new_cdp_session(part.page)
    try:
        root = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
        query = {"nodeId": root, "selector": f"[{_MARK}]"}
        node = session.send("DOM.querySelector", query)["nodeId"]
        tree = session.send("Accessibility.queryAXTree", {"nodeId": node})["nodes"]
    finally:
        session.detach()
        part.evaluate(f"e => e.removeAttribute('{_MARK}')")
    controls = [one for one in tree if not one["ignored"] and one["role"]["value"] in _CONTROLS]
    assert controls, "there are no controls at all"
    return [one["role"]["value"] for one in controls if not _name(one)]


def _name(node: dict[str, Any]) -> str:
    return str(node.get("name", {}).get("value", "")).strip()


_TABBABLE = """e => [...e.querySelectorAll("button, input, select, textarea")]
  .filter(one => one.checkVisibility({visibilityProperty: true}))
  .filter(one => !one.disabled && one.tabIndex >= 0)
  .map(one => one.title || one.labels?.[0]?.textContent || one.textContent)"""

# A text for a control; empty for what is only scrolled, which a browser focuses too.
_FOCUSED = """e => {
  const one = document.activeElement;
  if (!e.contains(one)) return null;
  if (!one.matches("button, input, select, textarea")) return "";
  return one.title || one.labels?.[0]?.textContent || one.textContent;
}"""


def by_tab(part: Locator) -> tuple[list[str], list[str]]:
    """The controls below an element as they stand, and as Tab goes through them."""
    while True:  # what opens and closes by itself, as a link does once something is there
        expected: list[str] = part.evaluate(_TABBABLE)
        seen = _tabbed(part, len(expected))
        if part.evaluate(_TABBABLE) == expected:
            return expected, seen


def _tabbed(part: Locator, most: int) -> list[str]:
    part.locator("button:enabled").locator("visible=true").first.focus()
    seen: list[str] = []
    while (here := part.evaluate(_FOCUSED)) is not None and len(seen) <= most:
        seen += [here] if here else []
        part.page.keyboard.press("Tab")
    return seen
