"""Marks for tests of frameworks that may not be installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip, and say so, where one of these cannot be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    reason = f"{', '.join(missing)} not installed here: make test-integrations runs this test"
    return pytest.mark.skipif(bool(missing), reason=reason)
