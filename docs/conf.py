"""Build the documentation site: ``make docs``.

The pages are the Markdown files of this folder. The reference is made from docstrings, from the
schema of the settings and from the command line; the notebooks are shown with their stored outputs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]

import nbtoolkit  # noqa: E402

project = "nbtoolkit"
version = release = nbtoolkit.__version__
copyright = "the authors of nbtoolkit, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "notebook_pages",
    "settings_reference",
    "command_reference",
    "other_names",
    "grace_periods",
]
exclude_patterns = ["extensions"]

# "owner/name" on GitHub, for the links that open a notebook in Colab and Kaggle; "" without one.
# GitHub Actions sets the variable.
repository = os.environ.get("GITHUB_REPOSITORY", "")

# --- other projects' names ---

# Their inventories need internet; a build at home or in CI has none.
if os.environ.get("READTHEDOCS"):
    extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "accelerate": ("https://huggingface.co/docs/accelerate/main/en", None),
    "optuna": ("https://optuna.readthedocs.io/en/stable", None),
}

# --- pages ---

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks hold the outputs of `make notebooks`
nb_mime_priority_overrides = [("html", "text/html", 0)]

# --- reference ---

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
add_module_names = False


def leave_out_arguments(app: Sphinx, what: str, *_: object) -> tuple[str, str] | None:
    """Show classes without their constructor: users get these objects from calls."""
    return ("", "") if what == "class" else None


def read_again(*_: object) -> list[str]:
    """Read the reference in every build: it shows the code, which Sphinx does not watch."""
    return [f"reference/{path.stem}" for path in (HERE / "reference").glob("*.rst")]


def show_options(app: Sphinx) -> None:
    """Show the options of a call in its signature; its overloads are for type checkers."""
    for call in (nbtoolkit.launch, nbtoolkit.sweep, nbtoolkit.cross_validate):
        source = ModuleAnalyzer.for_module(call.__module__)
        source.analyze()
        del source.overloads[call.__name__]


def setup(app: Sphinx) -> None:
    """Connect what the options above cannot say."""
    app.connect("autodoc-process-signature", leave_out_arguments)
    app.connect("env-get-outdated", read_again)
    app.connect("builder-inited", show_options)


# --- look ---

html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own choice, "native", underlines names
html_title = f"nbtoolkit {release}"
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["sides.css"]
copybutton_exclude = ".linenos, .gp, .go"
