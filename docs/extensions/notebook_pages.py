"""Show the example notebooks, which lie beside this folder, as pages of the site."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def copy_notebooks(app: Sphinx) -> None:
    """Copy them to ``notebooks/`` of the pages, which git ignores."""
    folder = Path(app.srcdir, "notebooks")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        shutil.copy2(path, folder)


def link_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links out of this folder, which work in a clone, lead to pages of the site."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")
    source[0] = source[0].replace("](../CHANGELOG.md)", "](changelog.rst)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Copy before the pages are read."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", link_to_pages)
    return {"parallel_read_safe": True}
