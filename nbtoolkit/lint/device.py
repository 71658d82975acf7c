"""Devices: used in the kernel, or named in a function that is to run on any."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbtoolkit.lint.hazard import Hazard, hazard
from nbtoolkit.lint.program import Program, Site

# Made in the kernel they are for one process; the ranks need their own.
_TOO_EARLY = {
    "DataLoader": "its workers and its order are for one process",
    "Accelerator": "accelerate then refuses to launch",
    "Trainer": "with two GPUs seen it wraps the model in DataParallel",
    "Seq2SeqTrainer": "with two GPUs seen it wraps the model in DataParallel",
}

_DEVICE_WORDS = ("device", "map_location", "device_map")

# Of torch.cuda: what takes no memory, and what only builds an object.
_QUESTIONS = {"torch.cuda.is_available", "torch.cuda.device_count", "torch.cuda.get_arch_list"}
_HARMLESS = {"torch.cuda.amp.GradScaler", "torch.cuda.amp.autocast"}


def device_in_kernel(program: Program) -> Iterator[Hazard]:
    """Uses of a device by the kernel, which then keeps a part of its memory."""
    names = _device_names(program)
    for site in program.in_kernel():
        if isinstance(site.node, ast.Call) and (what := _use(site.node, program, names)):
            yield _at(site, "device-in-kernel", what)


def fixed_device(program: Program) -> Iterator[Hazard]:
    """Devices named by code that runs in every rank."""
    for site in program.in_ranks():
        if isinstance(site.node, ast.Call) and (why := _placement(site.node, set())):
            what = f"{why} fails without a GPU, and may put every rank on the same one"
            yield _at(site, "fixed-device", what)


def built_before_launch(program: Program) -> Iterator[Hazard]:
    """What is made for one process in the kernel, above a launch."""
    first = program.first_launch()
    for site in program.in_kernel():
        if not isinstance(site.node, ast.Call) or first is None:
            continue
        name = program.names.full(site.node.func).rpartition(".")[2]
        if name in _TOO_EARLY and (site.cell.number, site.node.lineno) < first:
            what = f"{name}(...) is made in the kernel, before the launch: {_TOO_EARLY[name]}"
            yield _at(site, "built-before-launch", what)


def _at(site: Site, code: str, what: str) -> Hazard:
    return hazard(code, what, cell=site.cell.number, line=getattr(site.node, "lineno", 0))


def _use(call: ast.Call, program: Program, names: set[str]) -> str:
    full = program.names.full(call.func)
    if full in _QUESTIONS:
        return f"{full}() wakes the driver in the kernel: what is forked from it can use no GPU"
    if full.startswith("torch.cuda.") and full not in _HARMLESS:
        return f"{full}() makes the kernel hold a GPU"
    placement = _placement(call, names)
    return f"{placement} makes the kernel hold a GPU" if placement else ""


def _placement(call: ast.Call, names: set[str]) -> str:
    """How a call puts something on a GPU; empty where it does not."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method == "cuda" and not isinstance(call.func, ast.Name):
        return ".cuda()"
    if method in ("to", "set_default_device"):
        words = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "device")]
    else:
        words = [word.value for word in call.keywords if word.arg in _DEVICE_WORDS]
    found = next((word for word in words if _is_gpu(word, names)), None)
    return "" if found is None else f"{method or 'this call'}({ast.unparse(found)})"


def _is_gpu(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Call):  # torch.device("cuda", 0)
        return any(_is_gpu(word, names) for word in node.args[:1])
    return isinstance(node, ast.Constant) and str(node.value).startswith("cuda")


def _device_names(program: Program) -> set[str]:
    """Variables of the kernel that may stand for a GPU: ``device = "cuda" if ... else "cpu"``."""
    found = set()
    for site in program.in_kernel():
        if isinstance(site.node, ast.Assign) and any(
            isinstance(part, ast.Constant) and str(part.value).startswith("cuda")
            for part in ast.walk(site.node.value)
        ):
            found |= {target.id for target in site.node.targets if isinstance(target, ast.Name)}
    return found
