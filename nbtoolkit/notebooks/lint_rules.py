"""Define the rules on devices and ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nbtoolkit.notebooks.program import NotebookProgram, Site, mentions_rank

ADVICE: Mapping[str, str] = {
    "device-in-kernel": "move it into the function that is launched, with ctx.device; "
    "nb.detect_hardware() lists the devices without using them",
    "fixed-device": "use ctx.device, or let ctx.prepare or nb.fit place it",
    "built-before-launch": "make it inside the function that is launched",
    "unguarded-write": "put it under `if ctx.is_main:`, or put ctx.rank into the file's name; "
    "ctx.save and ctx.log need no `if`",
    "lone-collective": "move it out of the `if`, so that all ranks make this call",
}
"""Code of each hazard, and the advice for hazards without advice of their own."""


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """A place in a notebook that fails elsewhere, and what to do about it."""

    code: str
    """A key of :data:`ADVICE`, as in ``# nb: ignore[...]``."""
    cell: int
    """Number of the code cell, from 1."""
    line: int
    """Line in the cell, from 1."""
    what: str
    """What is wrong."""
    do: str
    """What to do now."""

    def sentence(self, notebook: str) -> str:
        """Return place, code, problem and advice as text.

        Args:
            notebook: the notebook's name.
        """
        place = f"{notebook}, cell {self.cell}, line {self.line}"
        return f"{place}: {self.code}: {self.what}\n  Do now:  {self.do}"


def _hazard(site: Site, code: str, problem: str, do: str = "") -> Hazard:
    """Return a hazard; ``do`` defaults to the advice for its code."""
    line = getattr(site.node, "lineno", 0)
    return Hazard(code=code, cell=site.cell.number, line=line, what=problem, do=do or ADVICE[code])


# Objects that belong to one process; the ranks need their own.
_TOO_EARLY = {
    "DataLoader": "its workers and its order belong to one process",
    "Accelerator": "accelerate then refuses to launch",
    "Trainer": "with two visible GPUs it wraps the model in DataParallel",
    "Seq2SeqTrainer": "with two visible GPUs it wraps the model in DataParallel",
}

_DEVICE_KEYWORDS = ("device", "map_location", "device_map")

# Functions of torch.cuda that take no GPU memory, and those that only build an object.
_QUERIES = {"torch.cuda.is_available", "torch.cuda.device_count", "torch.cuda.get_arch_list"}
_HARMLESS = {"torch.cuda.amp.GradScaler", "torch.cuda.amp.autocast"}


def device_in_kernel(program: NotebookProgram) -> Iterator[Hazard]:
    """Find uses of a GPU by the kernel, which then holds GPU memory."""
    names = _device_names(program)
    for site in program.in_kernel():
        if isinstance(site.node, ast.Call) and (problem := _gpu_use(site.node, program, names)):
            yield _hazard(site, "device-in-kernel", problem)


def fixed_device(program: NotebookProgram) -> Iterator[Hazard]:
    """Find fixed devices in code that runs in every rank."""
    for site in program.in_ranks():
        if isinstance(site.node, ast.Call) and (why := _placement(site.node, set())):
            problem = f"{why} fails without a GPU, and may put every rank on the same one"
            yield _hazard(site, "fixed-device", problem)


def built_before_launch(program: NotebookProgram) -> Iterator[Hazard]:
    """Find objects for one process that the kernel makes above a launch."""
    first = program.first_launch()
    for site in program.in_kernel():
        if not isinstance(site.node, ast.Call) or first is None:
            continue
        name = program.full_name(site.node.func).rpartition(".")[2]
        if name in _TOO_EARLY and (site.cell.number, site.node.lineno) < first:
            problem = f"{name}(...) is created in the kernel, before the launch: {_TOO_EARLY[name]}"
            yield _hazard(site, "built-before-launch", problem)


def _gpu_use(call: ast.Call, program: NotebookProgram, names: set[str]) -> str:
    full = program.full_name(call.func)
    if full in _QUERIES:
        return f"{full}() starts the driver in the kernel: its forked processes cannot use a GPU"
    if full.startswith("torch.cuda.") and full not in _HARMLESS:
        return f"{full}() makes the kernel hold a GPU"
    placement = _placement(call, names)
    return f"{placement} makes the kernel hold a GPU" if placement else ""


def _placement(call: ast.Call, names: set[str]) -> str:
    """Return the text of a call that places something on a GPU; empty for other calls."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method == "cuda" and not isinstance(call.func, ast.Name):
        return ".cuda()"
    if method in ("to", "set_default_device"):
        devices = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "device")]
    else:
        devices = [word.value for word in call.keywords if word.arg in _DEVICE_KEYWORDS]
    gpu = next((device for device in devices if _is_gpu(device, names)), None)
    return "" if gpu is None else f"{method or 'this call'}({ast.unparse(gpu)})"


def _is_gpu(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Call):  # torch.device("cuda", 0)
        return any(_is_gpu(argument, names) for argument in node.args[:1])
    return isinstance(node, ast.Constant) and str(node.value).startswith("cuda")


def _device_names(program: NotebookProgram) -> set[str]:
    """Return the kernel's variables that may be a GPU: ``device = "cuda" if ... else "cpu"``."""
    names = set()
    for site in program.in_kernel():
        if isinstance(site.node, ast.Assign) and any(
            isinstance(part, ast.Constant) and str(part.value).startswith("cuda")
            for part in ast.walk(site.node.value)
        ):
            names |= {target.id for target in site.node.targets if isinstance(target, ast.Name)}
    return names


# Calls that all ranks make together: of nbtoolkit, ctx, an Accelerator, torch.distributed.
_OURS = {"fit", "predict"}
_OF_CTX = {"report", "raise_if_stopped", "should_stop", "save", "prepare", "watch"}
_OF_ACCELERATOR = {"gather", "gather_for_metrics", "reduce", "wait_for_everyone", "prepare"}
_OF_TORCH = {"all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce"}

_WRAPS = ("ctx.prepare", "accelerator.prepare", "DistributedDataParallel")


def lone_collectives(program: NotebookProgram) -> Iterator[Hazard]:
    """Find calls under ``if ctx.is_main:`` in which the main rank waits for the others."""
    sites = list(program.in_ranks())
    wrapped = {name for site in sites for name in _wrapped(site.node)}
    for site in sites:
        call = site.node
        if not site.guarded or not isinstance(call, ast.Call):
            continue
        if name := _collective(program.full_name(call.func), ast.unparse(call.func)):
            problem = f"only the main rank calls {name}, which waits for the other ranks"
            yield _hazard(site, "lone-collective", problem)
        elif isinstance(call.func, ast.Name) and call.func.id in wrapped:
            problem = f"only the main rank calls {call.func.id}(...): DDP waits for the other ranks"
            do = f"move it out of the `if`, or call ctx.unwrap({call.func.id})(...)"
            yield _hazard(site, "lone-collective", problem, do)


def _collective(full: str, written: str) -> str:
    """Return the name of a collective call; empty for other calls.

    Args:
        full: the name of the function, by the notebook's imports.
        written: the function as written.
    """
    owner, _, name = full.rpartition(".")
    holder = written.rpartition(".")[0]
    if owner.partition(".")[0] == "nbtoolkit" and name in _OURS:
        return f"nb.{name}"
    if holder == "ctx" and name in _OF_CTX:
        return f"ctx.{name}"
    if holder.endswith("accelerator") and name in _OF_ACCELERATOR:
        return written
    return written if owner == "torch.distributed" and name in _OF_TORCH else ""


def _wrapped(node: ast.AST) -> list[str]:
    """Return the variables that a statement assigns the result of ``ctx.prepare`` or DDP to."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return []
    if not ast.unparse(node.value.func).endswith(_WRAPS):
        return []
    targets = [
        inner
        for target in node.targets
        for inner in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
    ]
    return [target.id for target in targets if isinstance(target, ast.Name)]


_FUNCTIONS = {
    "torch.save",
    "numpy.save",
    "numpy.savez",
    "numpy.savez_compressed",
    "numpy.savetxt",
    "pickle.dump",
    "json.dump",
    "yaml.dump",
    "joblib.dump",
    "shutil.copy",
    "shutil.copyfile",
    "shutil.copytree",
    "shutil.move",
    "shutil.rmtree",
    "os.remove",
    "torch.utils.tensorboard.SummaryWriter",
    "tensorboardX.SummaryWriter",
}
# Beginnings of full names.
_TRACKING = ("mlflow.log_", "mlflow.set_", "mlflow.start_run", "wandb.init", "wandb.log")

_METHODS = {
    "to_csv",
    "to_parquet",
    "to_pickle",
    "to_json",
    "to_feather",
    "to_excel",
    "write_text",
    "write_bytes",
    "savefig",
    "save_pretrained",
    "push_to_hub",
    "unlink",
}
# Without a path, pandas returns a text.
_NEED_A_PATH = {"to_csv", "to_json"}


def unguarded_writes(program: NotebookProgram) -> Iterator[Hazard]:
    """Find writes that every rank makes to the same file."""
    for site in program.in_ranks():
        call = site.node
        if site.guarded or not isinstance(call, ast.Call) or mentions_rank(call):
            continue
        if name := _write(call, program.full_name(call.func)):
            yield _hazard(site, "unguarded-write", f"every rank calls {name}")


def _write(call: ast.Call, full: str) -> str:
    """Return the name of a function that writes; empty for other calls."""
    method = full.rpartition(".")[2]
    if full in _FUNCTIONS or full.startswith(_TRACKING):
        return full
    if method == "open" and _writes(call, first=1 if full in ("open", "io.open") else 0):
        return "open(..., 'w')"
    if method in _METHODS and "." in full:
        return "" if method in _NEED_A_PATH and not call.args + call.keywords else f".{method}"
    return ""


def _writes(call: ast.Call, first: int) -> bool:
    """Whether ``open`` opens a file to write; ``first`` is the position of the mode."""
    by_keyword = [word.value for word in call.keywords if word.arg == "mode"]
    modes = by_keyword or call.args[first : first + 1]
    return any(
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and bool(set(mode.value) & set("wax+"))
        and set(mode.value) <= set("rwaxbt+U")
        for mode in modes
    )
