"""TorchBuild: which GPUs the installed torch has code for; read from its files, nothing imported.

``torch.cuda.get_arch_list()`` cannot be used: its ``torch._C._cuda_getArchFlags`` registers the
fork handler after which CUDA refuses to work in every fork of this process (read in the machine
code of 2.13.0+cu130), and importing torch takes 1.2 s and more. The same list stands as one
NUL-terminated string in ``libtorch_python.so``; finding it takes 20 ms (30 MB; 2.6.0+cu124 and
2.13.0+cu130).
"""

from __future__ import annotations

import ast
import mmap
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ARCH_LIST = re.compile(rb"\0(sm_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)\0")
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for."""

    version: str
    """``torch.__version__``, such as ``2.6.0+cu124``."""
    cuda: str | None
    """The CUDA version it was built with; None for a CPU (or ROCm) build."""
    arch: tuple[str, ...] = ()
    """The architectures it has code for, such as ``sm_75``; empty when they could not be read."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether some code in this build runs on a GPU of compute capability ``capability``.

        An unknown list (:attr:`arch` empty) counts as yes, as in torch itself.
        """
        return not self.arch or any(_covers(name, capability) for name in self.arch)


def read_torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Read what the installed torch was built for, without importing it.

    Args:
        folder: the package's folder; default: where ``import torch`` would find it.

    Returns:
        None when torch is not installed.
    """
    folder = folder or _torch_folder()
    if folder is None or not (folder / "version.py").is_file():
        return None
    facts = _assignments((folder / "version.py").read_text())
    return TorchBuild(
        version=str(facts.get("__version__", "of unknown version")),
        cuda=facts.get("cuda"),
        arch=_arch_list(folder / "lib" / "libtorch_python.so"),
    )


def _torch_folder() -> Path | None:
    spec = find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def _assignments(source: str) -> dict[str, Any]:
    """The constants a module assigns at its top level: ``cuda: Optional[str] = '12.4'``."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                found[target.id] = node.value.value
    return found


def _arch_list(library: Path) -> tuple[str, ...]:
    """The longest list of architectures in the library; empty when there is none (a CPU build)."""
    if not library.is_file() or not library.stat().st_size:
        return ()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        lists = [match.group(1).decode() for match in _ARCH_LIST.finditer(data)]
    return tuple(max(lists, key=len, default="").split())


def _covers(name: str, capability: tuple[int, int]) -> bool:
    """Whether code for architecture ``name`` runs on ``capability`` (NVIDIA's compatibility rules).

    Binary code (``sm_75``) runs on its major version from its minor version on, PTX
    (``compute_90``) on everything newer; a suffix ``a`` binds to exactly this capability, ``f`` to
    this family.
    """
    match = _ARCH.fullmatch(name)
    if match is None:
        return False
    kind, major, minor, suffix = match.groups()
    built = (int(major), int(minor))
    if suffix == "a":
        return capability == built
    if kind == "compute" and not suffix:
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]
