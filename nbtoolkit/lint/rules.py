"""Find hazards such as devices, hidden state, absolute paths, random splits, unguarded writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy

from nbtoolkit.errors import MissingExtra
from nbtoolkit.lint.source import Cell, Hazard, NotebookProgram, Site, hazard, mentions_rank

# --- device ---
# Used in the kernel, or named in a function that is to run on any.


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


def device_in_kernel(program: NotebookProgram) -> Iterator[Hazard]:
    """Uses of a device by the kernel, which then keeps a part of its memory."""
    names = _device_names(program)
    for site in program.in_kernel():
        if isinstance(site.node, ast.Call) and (what := _use(site.node, program, names)):
            yield _at(site, "device-in-kernel", what)


def fixed_device(program: NotebookProgram) -> Iterator[Hazard]:
    """Devices named by code that runs in every rank."""
    for site in program.in_ranks():
        if isinstance(site.node, ast.Call) and (why := _placement(site.node, set())):
            what = f"{why} fails without a GPU, and may put every rank on the same one"
            yield _at(site, "fixed-device", what)


def built_before_launch(program: NotebookProgram) -> Iterator[Hazard]:
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


def _use(call: ast.Call, program: NotebookProgram, names: set[str]) -> str:
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


def _device_names(program: NotebookProgram) -> set[str]:
    """Variables of the kernel that may stand for a GPU: ``device = "cuda" if ... else "cpu"``."""
    found = set()
    for site in program.in_kernel():
        if isinstance(site.node, ast.Assign) and any(
            isinstance(part, ast.Constant) and str(part.value).startswith("cuda")
            for part in ast.walk(site.node.value)
        ):
            found |= {target.id for target in site.node.targets if isinstance(target, ast.Name)}
    return found


# --- order ---
# Hidden state: names that a run from top to bottom does not have, outputs of another order.


# What IPython puts beside Python's own names.
_IPYTHON = {"get_ipython", "display", "In", "Out", "_", "__", "___", "exit", "quit", "_i", "_ih"}


def undefined_names(cells: list[Cell]) -> Iterator[Hazard]:
    """Names that are read before any cell above has defined them.

    The cells are looked at as one module by pyflakes (https://github.com/PyCQA/pyflakes).

    Raises:
        MissingExtra: pyflakes is not installed.
    """
    try:
        from pyflakes.checker import Checker
        from pyflakes.messages import UndefinedName
    except ImportError as error:
        raise MissingExtra(
            "looking for undefined names needs pyflakes", do="pip install pyflakes"
        ) from error
    if any(_brings_names(cell) for cell in cells):
        return
    module, places = _as_module(cells)
    told = set()
    for message in Checker(module, builtins=_IPYTHON).messages:
        name = message.message_args[0] if isinstance(message, UndefinedName) else ""
        if name and name not in told:
            told.add(name)
            cell, line = places[message.lineno]
            yield hazard("undefined-name", _undefined(name, cells, cell), cell=cell, line=line)


def out_of_order(cells: list[Cell]) -> Iterator[Hazard]:
    """Cells that were run before one that stands above them."""
    above = 0
    for cell in cells:
        count = cell.execution_count or above
        if count < above:
            what = f"it was run as number {count}, a cell above it as number {above}"
            yield hazard("out-of-order", what, cell=cell.number)
            return
        above = count


def _undefined(name: str, cells: list[Cell], number: int) -> str:
    later = [cell.number for cell in cells if cell.number > number and _assigns(cell, name)]
    if later:
        return f"{name} is read here and defined in cell {later[0]} below"
    return f"{name} is defined nowhere in the notebook"


def _assigns(cell: Cell, name: str) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or name in (getattr(node, "name", None), getattr(node, "asname", None))
        for node in ast.walk(cell.tree)
    )


def _brings_names(cell: Cell) -> bool:
    """Whether it may define names that cannot be read in it."""
    calls = (node for node in ast.walk(cell.tree) if isinstance(node, ast.Call))
    return cell.error is not None or any(
        ast.unparse(call.func) == "get_ipython().run_line_magic"
        and getattr(call.args[0], "value", "") in ("run", "pylab", "store")
        for call in calls
    )


def _as_module(cells: list[Cell]) -> tuple[ast.Module, dict[int, tuple[int, int]]]:
    """All cells as one module, and for each line of it the cell and the line there."""
    body: list[ast.stmt] = []
    places: dict[int, tuple[int, int]] = {}
    offset = 0
    for cell in cells:
        last = max((statement.end_lineno or 0 for statement in cell.tree.body), default=0)
        places |= {offset + line: (cell.number, line) for line in range(1, last + 1)}
        body += ast.increment_lineno(deepcopy(cell.tree), offset).body
        offset += last
    return ast.Module(body, []), places


# --- paths ---
# Absolute paths: of one machine, written into a notebook that is to run on any.


# Folders that one machine or host has and others have not (/tmp and /dev/shm are everywhere).
_HERE_ONLY = re.compile(
    r"(/(home|Users|root|mnt|media|data|datasets|content|kaggle|workspace|scratch|drive|dbfs)/"
    r"|[A-Z]:[\\/])\S"
)
_SEARCHES = {"glob", "rglob", "exists", "is_dir", "is_file", "isdir", "isfile"}


def absolute_paths(cells: list[Cell]) -> Iterator[Hazard]:
    """Absolute paths outside the parameters cell, but for those that are only looked for."""
    for cell in cells:
        if cell.is_parameters:
            continue
        searched = set(_searched(cell.tree))
        for node in ast.walk(cell.tree):
            if node not in searched and (path := _path(node)):
                line = getattr(node, "lineno", 0)
                what = f"{path!r} is a path of one machine"
                yield hazard("absolute-path", what, cell=cell.number, line=line)


def _path(node: ast.AST) -> str:
    """The path that a text is, or that a shell's line has in it; empty where there is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if _HERE_ONLY.match(node.value) and "\n" not in node.value else ""
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython()."):
        words = [word for text in node.args for word in str(getattr(text, "value", "")).split()[1:]]
        return next(filter(_HERE_ONLY.match, words), "")
    return ""


def _searched(tree: ast.AST) -> Iterator[ast.AST]:
    """Texts in ``Path("/x").glob(...)``, ``os.path.exists("/x")``: where there is none, no harm."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.rpartition(".")[2] in _SEARCHES:
                yield from ast.walk(node)


# --- splits ---
# Of a data set at random, other ones at every run.


# Shuffled when asked to, and always: https://scikit-learn.org/stable/api/sklearn.model_selection
_ON_REQUEST = {"KFold", "StratifiedKFold", "StratifiedGroupKFold"}
_ALWAYS = {
    "train_test_split",
    "ShuffleSplit",
    "StratifiedShuffleSplit",
    "GroupShuffleSplit",
    "RepeatedKFold",
    "RepeatedStratifiedKFold",
}

# What makes a split repeat itself though it has no seed of its own.
_SEEDS = {"random_state=": "numpy.random.seed", "generator=": "torch.manual_seed"}
_SEED_ALL = ("seed_everything", "set_seed", "enable_full_determinism")


def unseeded_splits(program: NotebookProgram) -> Iterator[Hazard]:
    """Random splits without a seed, in the kernel and in the ranks."""
    told: set[ast.AST] = set()
    for sites in (program.in_kernel(), program.in_ranks()):
        called: set[str] = set()
        for site in sites:
            if not isinstance(site.node, ast.Call) or site.node in told:
                continue
            full = program.names.full(site.node.func)
            called.add(full)
            missing = _unseeded(site.node, name := full.rpartition(".")[2])
            if missing and _SEEDS[missing] not in called and not any(map(_seeds_all, called)):
                told.add(site.node)
                what = f"{name}(...) without {missing} splits anew at every run"
                yield hazard("unseeded-split", what, cell=site.cell.number, line=site.node.lineno)


def _seeds_all(full: str) -> bool:
    return full.rpartition(".")[2] in _SEED_ALL


def _unseeded(call: ast.Call, name: str) -> str:
    """What a call lacks to split the same way every time; empty where it lacks nothing."""
    words = {word.arg: word.value for word in call.keywords}
    if None in words:  # **options: who knows
        return ""
    if name == "random_split":
        return "" if "generator" in words or len(call.args) > 2 else "generator="
    if name == "sample":  # of pandas; others have no frac
        at_random = "frac" in words
    else:
        always = name in _ALWAYS and not _is(words.get("shuffle"), False)
        at_random = always or (name in _ON_REQUEST and _is(words.get("shuffle"), True))
    given = "random_state" in words and not _is(words["random_state"], None)
    return "random_state=" if at_random and not given else ""


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


# --- together ---
# Calls that all ranks make together, where only the main rank comes.


# By their last part: of nbtoolkit, of ctx, of an Accelerator, of torch.distributed.
_OURS = {"fit", "predict"}
_OF_CTX = {"report", "raise_if_stopped", "should_stop", "save", "prepare"}
_OF_ACCELERATOR = {"gather", "gather_for_metrics", "reduce", "wait_for_everyone", "prepare"}
_OF_TORCH = {"all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce"}

_WRAPS = ("ctx.prepare", "accelerator.prepare", "DistributedDataParallel")


def lone_collectives(program: NotebookProgram) -> Iterator[Hazard]:
    """Calls under ``if ctx.is_main:`` in which the main rank waits for the others."""
    sites = list(program.in_ranks())
    wrapped = {name for site in sites for name in _wrapped(site.node)}
    for site in sites:
        call = site.node
        if not site.guarded or not isinstance(call, ast.Call):
            continue
        if name := _together(program.names.full(call.func), ast.unparse(call.func)):
            what = f"{name} is called by the main rank only, and waits for the others"
            yield hazard("lone-collective", what, cell=site.cell.number, line=call.lineno)
        elif isinstance(call.func, ast.Name) and call.func.id in wrapped:
            what = f"{call.func.id}(...) is called by the main rank only: DDP waits for the others"
            do = f"take it out of the `if`, or call ctx.unwrap({call.func.id})(...)"
            yield hazard("lone-collective", what, cell=site.cell.number, line=call.lineno, do=do)


def _together(full: str, written: str) -> str:
    """The name of what all ranks call together; empty for other calls."""
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
    """Names that are given what ``ctx.prepare`` or DDP return."""
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


# --- writes ---


# Full names, and of some modules whatever begins so.
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
# pandas gives back a text where no place is named.
_NEED_A_PLACE = {"to_csv", "to_json"}


def unguarded_writes(program: NotebookProgram) -> Iterator[Hazard]:
    """Writes that every rank makes, to the same place."""
    for site in program.in_ranks():
        call = site.node
        if site.guarded or not isinstance(call, ast.Call) or mentions_rank(call):
            continue
        if name := _write(call, program.names.full(call.func)):
            what = f"{name} is called by every rank"
            yield hazard("unguarded-write", what, cell=site.cell.number, line=call.lineno)


def _write(call: ast.Call, full: str) -> str:
    """The name of what a call writes with; empty where it does not write."""
    method = full.rpartition(".")[2]
    if full in _FUNCTIONS or full.startswith(_TRACKING):
        return full
    if method == "open" and _writes(call, first=1 if full in ("open", "io.open") else 0):
        return "open(..., 'w')"
    if method in _METHODS and "." in full:
        return "" if method in _NEED_A_PLACE and not call.args + call.keywords else f".{method}"
    return ""


def _writes(call: ast.Call, first: int) -> bool:
    """Whether ``open`` is asked to write; ``first`` is the mode's place among the arguments."""
    named = [word.value for word in call.keywords if word.arg == "mode"]
    modes = named or call.args[first : first + 1]
    return any(
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and bool(set(mode.value) & set("wax+"))
        and set(mode.value) <= set("rwaxbt+U")
        for mode in modes
    )
