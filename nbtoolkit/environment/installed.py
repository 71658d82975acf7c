"""Record what a rank imports, and compare environments in which imports behave differently."""

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
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType
from typing import Any

# What scikit-learn sets when it is imported. A kernel that imports it between two launches is the
# same environment.
_SET_BY_SCIKIT_LEARN = frozenset({("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")})

# Variables that say nothing about how a package behaves. pytest sets its own anew for each test.
_IRRELEVANT = frozenset(
    {"PWD", "OLDPWD", "_", "SHLVL", "COLUMNS", "LINES", "JPY_PARENT_PID", "JPY_SESSION_NAME"}
    | {"PYTEST_CURRENT_TEST"}
)


@functools.cache  # 3 ms, which every rank would pay
def installed_roots() -> tuple[str, ...]:
    """The folders that packages are installed in: this Python's own and others on sys.path."""
    roots = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
    }
    roots.update(site.getsitepackages())
    # A .pth file or PYTHONPATH adds the packages of another Python: an image with its own torch.
    roots.update(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return tuple(os.path.join(root, "") for root in sorted(roots))


def environment_key(environ: Mapping[str, str]) -> str:
    """Equal for environments under which imports behave alike."""
    kept = sorted(
        (name, value)
        for name, value in environ.items()
        if name not in _IRRELEVANT and not _is_set_by_library(name, value)
    )
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def _is_set_by_library(name: str, value: str) -> bool:
    """Whether a library sets this variable to this value, and not the user."""
    if name == "TORCHINDUCTOR_CACHE_DIR":
        # torch sets it to <tmp>/torchinductor_<user> when the first optimizer is made.
        return os.path.basename(value).startswith("torchinductor_")
    return (name, value) in _SET_BY_SCIKIT_LEARN


class ImportNotes:
    """In a rank: notes which installed packages are imported, the moment their import begins."""

    def __init__(self, tell: Callable[[list[str]], None]) -> None:
        self._tell, self._roots = tell, installed_roots()
        self._told: set[str] = set()
        # Not what was there at the start: to look through sys.modules copies 2,000 pages that the
        # fork server shares, 6 ms.
        self._asked: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The import system's question; answered as the other finders do."""
        if not _is_import():
            return None
        root, dot, _ = name.partition(".")
        if dot:
            # a late part of what the fork server has: torch._dynamo takes 1 s at the first
            # optimizer
            if root not in self._asked and _is_outermost():
                self._tell([name])
            return None
        self._asked.add(name)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.origin and spec.origin.startswith(self._roots):
                    self._told.add(name)
                    self._tell([name])
                return spec
        return None

    def tell_submodules(self) -> None:
        """The submodules that came later, for packages that load their parts lazily."""
        if not self._told:
            return
        late = [
            name for name in sys.modules if "." in name and name.partition(".")[0] in self._told
        ]
        if late:
            self._tell(sorted(late)[:2000])


def _is_import() -> bool:
    """Whether a module is imported, and not just looked for (importlib.util.find_spec).

    torch._dynamo looks for pandas and scikit-learn, and a branch would take 1.6 s to import them.
    """
    # Frames: this function, ImportNotes.find_spec, the import system's _find_spec, its caller.
    asker = sys._getframe(3)
    return asker.f_code.co_filename.startswith("<frozen importlib._bootstrap>")


def _is_outermost() -> bool:
    """Whether the import that asks is not part of another one (which brings it along)."""
    frame: FrameType | None = sys._getframe(2)
    running = 0
    while frame is not None and running < 2:
        code = frame.f_code
        running += code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen")
        frame = frame.f_back
    return running == 1


Versions = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """The installed version of a distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def known_bad(
    version: Versions = installed_version, folders: Mapping[str, Path] | None = None
) -> list[str]:
    """Sentences about pairs that are known to be bad; each says what it breaks and what helps.

    Args:
        version: the installed version of a distribution by name.
        folders: where packages lie, by name; looked up when None.
    """
    where = _folder if folders is None else folders.get
    numa = _numa(where("accelerate"), where("torch"))
    found = [numa, _torchao(version), _torch_floor(version), _stranger(version)]
    return [sentence for sentence in found if sentence]


def _numa(accelerate: Path | None, torch: Path | None) -> str:
    # huggingface/accelerate#3833, #3925; fixed by PR #4059 (2026-05-29), which takes the NUMA
    # options back out.
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
    if torchao is not None and accelerate is not None and _numbers(accelerate) < (1, 7):
        return (
            f"accelerate {accelerate} imports torchao {torchao}, which initialises CUDA "
            "(accelerate#3524): plain notebook_launcher fails on GPUs; pip install -U accelerate"
        )
    return ""


def _torch_floor(version: Versions) -> str:
    torch = version("torch")
    if torch is not None and _numbers(torch) < (2, 6):
        return f"torch {torch} is older than 2.6, the oldest we work with; pip install -U torch"
    return ""


def _stranger(version: Versions) -> str:
    # https://pypi.org/project/nbtoolkit: it writes into the same folder of site-packages.
    found = version("nbtoolkit")
    if found is not None:
        return (
            f"the distribution nbtoolkit {found} is installed, another project's: this package is "
            "called nbtoolkit-torch there; pip uninstall nbtoolkit, and install this one again"
        )
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``"2.13.0+cpu"`` is ``(2, 13, 0)``."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
