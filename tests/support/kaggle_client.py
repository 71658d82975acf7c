"""Kaggle's own client without a network: it checks a folder and keeps what it would send."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest


def pushed(folder: Path) -> tuple[Any, str]:
    """What ``kaggle kernels push -p folder`` would send, and what it prints.

    Raises:
        ValueError: the client refuses the folder.
    """
    sent: list[Any] = []
    told = io.StringIO()

    class Client(_imported().KaggleApi):
        config_values: ClassVar[dict[str, str]] = {"username": "me"}

        @contextlib.contextmanager
        def build_kaggle_client(self) -> Iterator[Any]:
            save = SimpleNamespace(save_kernel=sent.append)
            yield SimpleNamespace(kernels=SimpleNamespace(kernels_api_client=save))

    with contextlib.redirect_stdout(told):
        Client().kernels_push(str(folder))
    return sent[0], told.getvalue()


@cache
def _imported() -> Any:
    """The client's module; ``import kaggle`` would look for credentials."""
    spec = find_spec("kaggle")
    if spec is None or spec.origin is None:  # the tests' own folder of this name has no file
        pytest.skip("Kaggle's client is not installed: it needs Python 3.11")
    bare = ModuleType("kaggle")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["kaggle"] = bare
    # The client makes this folder at import, and fails if another worker has just made it.
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    os.makedirs(os.environ.get("KAGGLE_CONFIG_DIR") or f"{home}/kaggle", exist_ok=True)
    import kaggle.api.kaggle_api_extended as api

    return api
