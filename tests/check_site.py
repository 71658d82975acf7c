"""Crawl the built documentation site: ``make docs``.

    python tests/check_site.py build/docs

Fails if a link leads nowhere, a page has no title, a page cannot be reached from the first one, a
notebook's page does not open it in Colab and Kaggle, or a public name, a setting or a command has
no entry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import typer.main

import nbtoolkit
from nbtoolkit.__main__ import command_line
from nbtoolkit.config.fields import allowed_values
from nbtoolkit.config.schema import Config
from nbtoolkit.search.study.sweep_config import SweepConfig

# Sphinx writes these for its own use.
NOT_PAGES = {"search.html", "genindex.html", "py-modindex.html"}

# Every notebook's page has a link that opens it there.
HOSTS = ("colab.research.google.com", "kaggle.com")


class Page(HTMLParser):
    """The title, the anchors and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.title = path, ""
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self._in_title = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._in_title |= tag == "title"
        if anchor := values.get("id"):
            self.anchors.add(anchor)
        for name in ("href", "src"):
            if link := values.get(name):
                self.links.append(link)

    def handle_endtag(self, tag: str) -> None:
        self._in_title &= tag != "title"

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data.strip()

    def leads_to(self, host: str) -> bool:
        """Whether a link leads to this host."""
        return any(urlsplit(link).netloc.removeprefix("www.") == host for link in self.links)

    def has(self, fragment: str) -> bool:
        """Whether a link may end in ``#fragment``."""
        return unquote(fragment) in self.anchors


def main(folder: Path) -> int:
    """Print what is wrong with a site; returns the exit code."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    reached, faults = {folder / "index.html"}, [*missing_entries(pages.values())]
    for path, page in pages.items():
        name = path.relative_to(folder)
        if not page.title:
            faults.append(f"{name} has no title")
        if name.parent.name == "notebooks":
            faults += [f"{name}: no link to {host}" for host in HOSTS if not page.leads_to(host)]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            reached |= {target} - {path}
            if not target.exists():
                faults.append(f"{name}: {link} does not exist")
            elif parts.fragment and target in pages and not pages[target].has(parts.fragment):
                faults.append(f"{name}: {link} has no such anchor")
    faults += [
        f"{path.relative_to(folder)}: no page links to it"
        for path in pages.keys() - reached
        if path.name not in NOT_PAGES
    ]
    print("\n".join(sorted(set(faults))) or f"{len(pages)} pages, no fault")
    return 1 if faults else 0


def missing_entries(pages: Iterable[Page]) -> list[str]:
    """Public names, settings and commands without an entry."""
    anchors = {anchor for page in pages for anchor in page.anchors}
    names = {f"nbtoolkit.{name}" for name in nbtoolkit.__all__ if not name.startswith("__")}
    names -= {"nbtoolkit.errors", "nbtoolkit.verify"}  # modules: their names are entries
    settings = {
        f"confval-{name}" for model in (Config, SweepConfig) for name in allowed_values(model)
    }
    commands = {f"nbtoolkit-{name}" for name in typer.main.get_command(command_line()).commands}
    return [f"no entry for {name}" for name in sorted((names | settings | commands) - anchors)]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
