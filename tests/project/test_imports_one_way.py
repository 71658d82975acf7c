"""Imports point one way along the order of the folders, inside functions too.

Read from the source, so that a module counts whether or not a test imports it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole import needs_extras

import nbtoolkit
from nbtoolkit.environment.installed import EXTRAS

PACKAGE = Path(nbtoolkit.__file__).parent

# A module may import those of its own layer and of the layers above, also inside functions. The
# package itself may be imported anywhere: it loads its names on first use.
LAYERS = (
    "version",
    "errors",
    "text_table",
    "cards",
    "host",
    "config",
    "environment",
    "wire",
    "run",
    "tracking",
    "worker",
    "launcher",
    "training",
    "search.folds",
    "tasks",
    "verify",
    "doctor",
    "search.study",
    "search",
    "search.crossval",
    "attach",
    "notebooks",
    "sessions",
    "views",
    "panel",
    "cli",
    "cli_notebooks",
    "__main__",
    # The users' name of an extra.
    "integrations",
    # What may be deleted: nothing imports it.
    "extras",
)

# Loading one of these loads none that comes later: the way of the data of a launch.
STATIONS = [
    {"errors", "config.loading"},
    {"config.schema"},
    {"environment.hardware"},
    {"environment.plan"},
    {"worker.context"},
    {"launcher.agent", "worker.main", "launcher.supervisor_process"},
    {"launcher.fork_servers", "launcher.in_process", "launcher.launch"},
]

# In this order a newcomer reads a training: none of them needs one before it.
TRAINING = ["training.fit", "training.step", "training.losses", "training.samples", "training.data"]

# What the kernel loads for a launch; torch and its kind are for the ranks.
KERNEL = [
    "config.schema",
    "doctor",
    "launcher.launch",
    "launcher.run_handle",
    "tasks.digits",
    "training.fit",
    # The fork server loads these two, and everything is forked from it.
    "search.scheduler",
    "search.crossval.fold_loop",
]
HEAVY = {
    "torch",
    "accelerate",
    "mlflow",
    "optuna",
    "transformers",
    "lightning",
    "sklearn",
    "pandas",
}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "nbtoolkit"


MODULES = {_name(path): path for path in PACKAGE.rglob("*.py")}


@functools.cache
def _imports(module: str, *, late: bool) -> frozenset[str]:
    """Modules that a module imports when it is loaded, or (late) inside its functions."""
    tree = ast.parse(MODULES[module].read_text())
    return frozenset(_found(tree, late=late, inside=False))


def _found(node: ast.AST, *, late: bool, inside: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if inside == late:
            yield from _targets(child)
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _found(child, late=late, inside=inside or function)


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for name in node.names:
            yield _ours(name.name)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for name in node.names:
            whole = _ours(f"{node.module}.{name.name}")
            yield whole if whole in MODULES else _ours(node.module)


def _ours(name: str) -> str:
    return name.removeprefix("nbtoolkit.")


def _layer(module: str) -> int:
    """Return the place of a module's folder, or of the folder within it that has its own."""
    folders = module.split(".")
    inner = ".".join(folders[:2])
    return LAYERS.index(inner if inner in LAYERS else folders[0])


@functools.cache
def _loads(module: str) -> set[str]:
    """Every module of ours that loading a module loads."""
    assert module in MODULES
    seen: set[str] = set()
    todo = [module]
    while todo:
        here = todo.pop()
        if here in MODULES and here not in seen:
            seen.add(here)
            todo += _imports(here, late=False)
    return seen


def _needs_directly(module: str) -> set[str]:
    both = _imports(module, late=False) | _imports(module, late=True)
    return set(both & set(MODULES)) - {"nbtoolkit"}


@functools.cache
def _needs(module: str) -> set[str]:
    """Every module of ours that a module may import, sooner or later."""
    assert module in MODULES
    seen: set[str] = set()
    todo = [module]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += _needs_directly(here)
    return seen


def test_a_module_imports_its_own_layer_and_those_above() -> None:
    wrong = {
        module: [one for one in _needs_directly(module) if _layer(one) > _layer(module)]
        for module in set(MODULES) - {"nbtoolkit"}
    }
    assert {module: found for module, found in wrong.items() if found} == {}


@pytest.mark.parametrize("number", range(len(STATIONS)))
def test_no_station_loads_a_later_one(number: int) -> None:
    later = set().union(*STATIONS[number + 1 :])
    for station in STATIONS[number]:
        assert not _loads(station) & later


@pytest.mark.parametrize("number", range(len(TRAINING)))
def test_a_training_is_read_from_the_fit_to_the_data(number: int) -> None:
    assert not _needs(TRAINING[number]) & {*TRAINING[:number]}


@needs_extras
def test_the_core_names_the_extras_in_one_table() -> None:
    """So that their folder can be deleted."""
    core = {name: path for name, path in MODULES.items() if not name.startswith("extras")}
    named = [name for name in core if "nbtoolkit.extras" in core[name].read_text()]
    assert named == ["environment.installed"]
    folders = {path.parent.name for path in (PACKAGE / "extras").glob("*/__init__.py")}
    assert {f"nbtoolkit.extras.{folder}" for folder in folders} == set(EXTRAS.values())


def test_no_module_needs_itself_in_a_circle() -> None:
    """Imports inside functions count: a module needs what any of its functions needs."""
    for module in set(MODULES) - {"nbtoolkit"}:
        others = _needs_directly(module) - {module}
        assert not [one for one in others if module in _needs(one)], module


@pytest.mark.parametrize("module", KERNEL)
def test_what_the_kernel_loads_imports_nothing_heavy(module: str) -> None:
    for loaded in _loads(module):
        roots = {name.partition(".")[0] for name in _imports(loaded, late=False)}
        assert not roots & HEAVY, loaded
