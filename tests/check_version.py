"""Fail when the newest version in CHANGELOG.md is not ``nbtoolkit.__version__``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def changelog_version() -> str:
    """The first version heading of the changelog, "Unreleased" aside."""
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return versions[0] if versions else "none"


def package_version() -> str:
    """The version the package says it has, read without importing it."""
    text = (ROOT / "nbtoolkit" / "version.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return found.group(1) if found else "none"


def main() -> int:
    """Compare the two; 0 when equal."""
    if changelog_version() == package_version():
        return 0
    print(f"CHANGELOG.md says {changelog_version()}, nbtoolkit/version.py {package_version()}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
