"""List the versions of the libraries that matter to a result."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform

from nbtoolkit.version import __version__

_LIBRARIES = ("torch", "accelerate", "numpy", "pydantic", "mlflow", "transformers")


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of Python, the platform and the libraries that matter to a result."""
    known = {"python": platform.python_version(), "platform": platform.platform()}
    known["nbtoolkit"] = __version__  # the distribution of that name on PyPI is another project's
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known
