"""Define the version of the package; hatch reads it from this file."""

from __future__ import annotations

__version__ = "0.2.0"
