"""One import that is a third of the time of a small notebook's run, and serves nothing in it."""

from __future__ import annotations

import sys
from typing import Any, cast


def skip_uri_grammars() -> None:
    """Let jsonschema load without ``rfc3987_syntax``, if it is not loaded yet.

    nbformat loads jsonschema, which takes that package where JupyterLab has brought it: as it is
    imported it builds 38 grammars (1.2 s), to check URIs, of which a notebook's schema has none.
    jsonschema does without it by design. For a process of ours only, not for somebody's kernel.
    """
    modules = cast("dict[str, Any]", sys.modules)
    modules.setdefault("rfc3987_syntax", None)  # None: an import of it raises ImportError
