"""Show the example notebooks, which lie beside this folder, as pages of the site."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
from sphinx.application import Sphinx

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

# The addresses with which Colab and Kaggle open a notebook from GitHub.
COLAB = "https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}"
KAGGLE = (
    "https://kaggle.com/kernels/welcome"
    "?src=https://github.com/{repository}/blob/main/notebooks/{name}"
)
ON_GITHUB = f"Open in [Colab]({COLAB}) or [Kaggle]({KAGGLE})."
UPLOADED = (
    "Download {{download}}`{name} <../../notebooks/{name}>`, then open it in [Colab](https://colab.research.google.com/#upload=true),"
    " or in [Kaggle](https://www.kaggle.com/code/new) with *File > Import Notebook*."
)


def copy_notebooks(app: Sphinx) -> None:
    """Copy them to ``notebooks/`` of the pages, which git ignores, with a line that opens each.

    Without the repository's address the line leads to the hosts' upload pages.
    """
    folder = Path(app.srcdir, "notebooks")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    line = ON_GITHUB if app.config.repository else UPLOADED
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        text = line.format(repository=app.config.repository, name=path.name)
        notebook.cells[0].source += f"\n\n{text}"
        nbformat.write(notebook, folder / path.name)


def link_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links out of this folder, which work in a clone, lead to pages of the site."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")
    source[0] = source[0].replace("](../CHANGELOG.md)", "](changelog.rst)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Copy before the pages are read."""
    app.add_config_value("repository", "", "env")
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", link_to_pages)
    return {"parallel_read_safe": True}
