"""Record what a rank imports, compare import environments, and detect broken installations."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

# scikit-learn sets these on import. A kernel that imports it between two launches keeps its
# environment.
_SET_BY_SCIKIT_LEARN = frozenset({("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")})

# Variables that do not affect how a package behaves. pytest sets its own for each test.
_IRRELEVANT = frozenset(
    {"PWD", "OLDPWD", "_", "SHLVL", "COLUMNS", "LINES", "JPY_PARENT_PID", "JPY_SESSION_NAME"}
    | {"PYTEST_CURRENT_TEST"}
)


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
    """Import finder of a rank that reports installed packages as their import starts.

    Args:
        report: called with the names of imported modules.
    """

    def __init__(self, report: Callable[[list[str]], None]) -> None:
        self._report, self._roots = report, installed_roots()
        self._reported: set[str] = set()
        # Starts empty: looking through sys.modules would copy 2,000 pages that are shared with the
        # fork server, which takes 6 ms.
        self._seen: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as the other finders do, and report it if it is imported."""
        if not _is_import():
            return None
        root, dot, _ = name.partition(".")
        if dot:
            # A lazy part of a package that the fork server has: torch._dynamo takes 1 s when the
            # first optimizer is created.
            if root not in self._seen and _is_outermost():
                self._report([name])
            return None
        self._seen.add(name)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.origin and spec.origin.startswith(self._roots):
                    self._reported.add(name)
                    self._report([name])
                return spec
        return None

    def report_submodules(self) -> None:
        """Report the imported submodules of the reported packages, which may load them lazily."""
        if not self._reported:
            return
        submodules = [
            name for name in sys.modules if "." in name and name.partition(".")[0] in self._reported
        ]
        if submodules:
            self._report(sorted(submodules)[:2000])


def _is_import() -> bool:
    """Return whether a module is imported, not only searched for (importlib.util.find_spec).

    torch._dynamo searches for pandas and scikit-learn; a branch would take 1.6 s to import them.
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


# --- known-bad versions ---


Versions = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def known_bad(
    version: Versions = installed_version, folders: Mapping[str, Path] | None = None
) -> list[str]:
    """Return a sentence for each known-bad installation: what it breaks and what to do.

    Args:
        version: returns the installed version of a distribution, or None.
        folders: folders of packages by name; default: looked up.
    """
    folder = package_folder if folders is None else folders.get
    numa = _numa(folder("accelerate"), folder("torch"))
    problems = [numa, _torchao(version), _torch_floor(version), _name_collision(version)]
    return [problem for problem in problems if problem]


def _numa(accelerate: Path | None, torch: Path | None) -> str:
    # huggingface/accelerate#3833, #3925; fixed by PR #4059 (2026-05-29), which removes the NUMA
    # options.
    if accelerate is None or torch is None or not (torch / "numa" / "binding.py").exists():
        return ""
    source = (accelerate / "launchers.py").read_text(errors="replace")
    if "numa_options" in source and "numa_options = None" not in source:
        return (
            "this accelerate asks torch for NUMA binding, which initialises CUDA before the fork "
            "(accelerate#3925): plain notebook_launcher fails on GPUs; nb.launch is not affected; "
            "pip install -U accelerate"
        )
    return ""


def _torchao(version: Versions) -> str:
    # huggingface/accelerate#3524: importing torchao touched CUDA; PR #3530 is in 1.7.
    accelerate, torchao = version("accelerate"), version("torchao")
    if torchao is not None and accelerate is not None and _release(accelerate) < (1, 7):
        return (
            f"accelerate {accelerate} imports torchao {torchao}, which initialises CUDA "
            "(accelerate#3524): plain notebook_launcher fails on GPUs; pip install -U accelerate"
        )
    return ""


def _torch_floor(version: Versions) -> str:
    torch = version("torch")
    if torch is not None and _release(torch) < (2, 6):
        return (
            f"torch {torch} is older than 2.6, the oldest supported version; pip install -U torch"
        )
    return ""


def _name_collision(version: Versions) -> str:
    # https://pypi.org/project/nbtoolkit writes to the same folder of site-packages.
    other = version("nbtoolkit")
    if other is not None:
        return (
            f"the distribution nbtoolkit {other} is installed, which is another project; this one "
            "is nbtoolkit-torch: pip uninstall nbtoolkit, and install this one again"
        )
    return ""


def _release(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release


def package_folder(name: str) -> Path | None:
    """Return the folder of an importable package, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
