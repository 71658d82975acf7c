"""Tests that are about the whole package, its extras included."""

from __future__ import annotations

import pytest

from nbtoolkit.environment.installed import EXTRAS, has_extra

needs_extras = pytest.mark.skipif(
    not all(map(has_extra, EXTRAS)), reason="NOT TESTED: this copy of nbtoolkit is without extras"
)
