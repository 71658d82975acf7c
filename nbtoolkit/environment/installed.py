"""Find what is installed, record what a rank imports, and compare import environments."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

from nbtoolkit.errors import MissingExtra

EXTRAS = {
    "cluster": "nbtoolkit.extras.cluster",
    "competition": "nbtoolkit.extras.competition",
    "integrations": "nbtoolkit.extras.integrations",
    "metric_learning": "nbtoolkit.extras.metric_learning",
    "tuning": "nbtoolkit.extras.tuning",
    "wandb": "nbtoolkit.extras.wandb",
}
"""The folders that may be deleted. The core names them only here, and ``__init__.pyi`` has their
public names."""

# scikit-learn sets these on import. A kernel that imports it between two launches keeps its
# environment.
_SET_BY_SCIKIT_LEARN = frozenset({("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")})

# Variables that do not affect how a package behaves. pytest sets its own for each test.
_IRRELEVANT = frozenset(
    {"PWD", "OLDPWD", "_", "SHLVL", "COLUMNS", "LINES", "JPY_PARENT_PID", "JPY_SESSION_NAME"}
    | {"PYTEST_CURRENT_TEST"}
)


# A package with more would take the next fork server a minute to import.
_MOST_MODULES = 2000


# Cached, since it takes 3 ms and every rank needs it.
@functools.cache
def installed_roots() -> tuple[str, ...]:
    """Return the folders of installed packages: this Python's own and others on sys.path."""
    roots = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
    }
    roots.update(site.getsitepackages())
    # A .pth file or PYTHONPATH may add the packages of another Python (an image's own torch).
    roots.update(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return tuple(os.path.join(root, "") for root in sorted(roots))


def environment_key(environ: Mapping[str, str]) -> str:
    """Hash an environment; equal for environments in which imports behave the same."""
    kept = sorted(
        (name, value)
        for name, value in environ.items()
        if name not in _IRRELEVANT and not _is_set_by_library(name, value)
    )
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def _is_set_by_library(name: str, value: str) -> bool:
    """Return whether a library, not the user, has set this variable to this value."""
    if name == "TORCHINDUCTOR_CACHE_DIR":
        # torch sets it to <tmp>/torchinductor_<user> when it creates the first optimizer.
        return os.path.basename(value).startswith("torchinductor_")
    return (name, value) in _SET_BY_SCIKIT_LEARN


class ImportRecorder:
    """Import finder of a rank that notes which installed packages are imported."""

    def __init__(self) -> None:
        self._roots = installed_roots()
        self._noted: list[str] = []
        # Starts empty: looking through sys.modules would copy 2,000 pages that are shared with the
        # fork server, which takes 6 ms.
        self._seen: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as the other finders do, and note it if it is imported."""
        if not _is_import():
            return None
        root, dot, _ = name.partition(".")
        if dot:
            # A lazy part of a package that the fork server has: torch.compile takes 2 s to import.
            if root not in self._seen and _is_outermost():
                self._noted.append(name)
            return None
        self._seen.add(name)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.origin and spec.origin.startswith(self._roots):
                    self._noted.append(name)
                return spec
        return None

    def names(self) -> list[str]:
        """Return the noted modules in the order of their imports, then their imported submodules.

        Packages may load their submodules lazily.
        """
        if not self._noted:
            return []
        noted = set(self._noted)
        below = tuple(f"{name}." for name in noted)
        submodules = [name for name in sys.modules if name.startswith(below) and name not in noted]
        return [*self._noted, *sorted(submodules)][:_MOST_MODULES]


def _is_import() -> bool:
    """Return whether a module is imported, not only searched for (importlib.util.find_spec).

    torch._dynamo searches for pandas and scikit-learn; their import takes 1.6 s.
    """
    # Frames: this function, ImportRecorder.find_spec, the import system's _find_spec, its caller.
    caller = sys._getframe(3)
    return caller.f_code.co_filename.startswith("<frozen importlib._bootstrap>")


def _is_outermost() -> bool:
    """Return whether the current import is not part of another import."""
    frame: FrameType | None = sys._getframe(2)
    running = 0
    while frame is not None and running < 2:
        code = frame.f_code
        running += code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen")
        frame = frame.f_back
    return running == 1


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_line(extra: str) -> str:
    """Return the command that installs the packages of an extra of nbtoolkit.

    It names the packages, since nbtoolkit itself may come from a wheel or a clone, not from an
    index. A clone that is not installed has no list of them: the command then names the clone.
    """
    try:
        lines = importlib.metadata.requires("nbtoolkit-torch") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    parts = [line.replace('"', "'").partition(";") for line in lines]
    needed = [name.strip() for name, _, marker in parts if marker.strip() == f"extra == '{extra}'"]
    words = needed or [f"{Path(__file__).resolve().parents[2]}[{extra}]"]
    return f"pip install {shlex.join(words)}"


def has_extra(name: str) -> bool:
    """Return False for an extra of :data:`EXTRAS` whose folder has been deleted."""
    *_, folder = EXTRAS[name].split(".")
    return (Path(__file__).parents[1] / "extras" / folder).is_dir()


def import_extra(name: str, module: str = "") -> ModuleType:
    """Import an extra of :data:`EXTRAS`, or a module of it.

    Raises:
        MissingExtra: its folder has been deleted.
    """
    if not has_extra(name):
        raise MissingExtra(
            f"this copy of nbtoolkit has no {EXTRAS[name]}",
            do="install the whole of nbtoolkit",
        )
    return importlib.import_module(".".join([EXTRAS[name], module]).rstrip("."))


def package_folder(name: str) -> Path | None:
    """Return the folder of an importable package, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
