"""nbtoolkit: one training function, any notebook, any number of devices.

Names load on first use, so that ``import nbtoolkit`` costs milliseconds and imports no torch.
``__init__.pyi`` lists them with their modules; this file reads it, as type checkers and editors do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from nbtoolkit.version import __version__ as __version__


def _public_names() -> dict[str, str]:
    """Read the list: public name -> module; a public module -> the package itself."""
    with open(os.path.splitext(__file__)[0] + ".pyi", encoding="utf-8") as stub:
        # from MODULE import NAME as NAME
        words = [line.split() for line in stub if line.startswith("from ")]
    return {line[-1]: line[1] for line in words if _is_here(line[1])}


def _is_here(module: str) -> bool:
    """Return False for a module of an extra whose folder has been deleted."""
    _, *folders = module.split(".")
    if folders[:1] != ["extras"]:
        return True
    return os.path.isdir(os.path.join(os.path.dirname(__file__), *folders[:2]))


_HOME = _public_names()

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'nbtoolkit' has no attribute {name!r}")
    if _HOME[name] == __name__:
        return import_module(f"nbtoolkit.{name}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return list(__all__)


class _Package(ModuleType):
    """The type of this package: a submodule cannot hide the public function of its name."""

    def __setattr__(self, name: str, value: object) -> None:
        # `import nbtoolkit.doctor` makes the import system set `nbtoolkit.doctor` to the module.
        module_of_a_name = isinstance(value, ModuleType) and _HOME.get(name, __name__) != __name__
        if not module_of_a_name:
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        # cloudpickle and dill pickle by name only modules whose type is exactly ModuleType.
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
