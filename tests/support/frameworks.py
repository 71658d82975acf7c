"""Marks for tests of frameworks that may not be installed."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip, and say so, where one of these cannot be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    reason = f"{', '.join(missing)} not installed here: make test-integrations runs this test"
    return pytest.mark.skipif(bool(missing), reason=reason)


def needs_torch(major: int, minor: int) -> pytest.MarkDecorator:
    """Skip, and say so, with an older torch, where nbtoolkit refuses what is tested."""
    here = version("torch")
    old = tuple(map(int, here.split(".")[:2])) < (major, minor)
    reason = f"NOT TESTED: needs torch {major}.{minor} on the CPU, and this is {here}"
    return pytest.mark.skipif(old, reason=reason)
