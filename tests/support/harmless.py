"""Text that must be shown as text, and the check that a page executes none of it."""

from __future__ import annotations

from base64 import b64decode
from html.parser import HTMLParser

EVIL = "<script>alert('$x$')</script>&<img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.images: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "img":  # it has no end
            self.images.append(dict(attrs).get("src") or "")
        else:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_harmless(page: str) -> None:
    """Fail if a page is not well formed or could execute or load anything."""
    tags = Tags(page)
    assert tags.open == []
    assert not tags.elements & {"script", "iframe", "style", "link"}
    assert not [name for name in tags.attributes if name.startswith("on")]
    for source in tags.images:
        address, _, image = source.partition(",")
        assert address == "data:image/svg+xml;base64"
        assert_harmless(b64decode(image).decode())
