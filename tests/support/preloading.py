"""Launches that report whether a rank finds a module imported already."""

from __future__ import annotations

import time

import nbtoolkit as nb

# Installed with torch, 280 modules in 0.3 s; nothing that the fork server imports needs it.
PACKAGE = "networkx"
UNSAFE = "computes_at_import"


def tell_and_import(name: str, config: nb.Config) -> bool:
    """Whether a rank finds ``name`` imported already."""

    def train(config: nb.Config, ctx: nb.RunContext) -> bool:
        import importlib
        import sys

        before = name in sys.modules
        importlib.import_module(name)
        return before

    return bool(nb.launch(train, config, processes=1, resume="never", display="off").value)


def launch_until(name: str, config: nb.Config, seconds: float = 240.0) -> bool:
    """Launch until a rank finds ``name`` imported already; False when none has in time."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if tell_and_import(name, config):
            return True
        time.sleep(0.2)  # the import needs the CPU more than another launch
    return False
