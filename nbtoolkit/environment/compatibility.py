"""List pairs of library versions that break launches, found without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

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
