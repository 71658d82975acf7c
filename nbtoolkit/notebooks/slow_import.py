"""Two imports that are a good part of a small notebook's run, and serve nothing in it."""

from __future__ import annotations

import sys
from typing import Any, cast


def skip_slow_imports() -> None:
    """Let papermill load without what it does not need here, as far as that is not loaded yet.

    nbformat loads jsonschema, which takes ``rfc3987_syntax`` where JupyterLab has brought it: as it
    is imported it builds 38 grammars (1.2 s), to check URIs, of which a notebook's schema has none.
    papermill loads ``pyarrow`` (0.2 s), to read notebooks from Hadoop, where MLflow has brought it.
    Both do without them by design. For a process of ours only, not for somebody's kernel.
    """
    modules = cast("dict[str, Any]", sys.modules)
    for name in ("rfc3987_syntax", "pyarrow"):
        modules.setdefault(name, None)  # None: an import of it raises ImportError
