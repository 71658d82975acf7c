"""Imports point one way, as the data do: config, host and hardware, plan, ranks, launch.

Read from the source, so that a module counts whether or not a test imports it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbtoolkit

PACKAGE = Path(nbtoolkit.__file__).parent

# Room -> rooms it may import when it is loaded. A new room gets its line here. The package itself
# may be imported anywhere: it loads its names on first use.
ROOMS = {
    "nbtoolkit": set(),
    "errors": set(),
    "config": {"errors"},
    "runtime": {"errors", "config"},
    "training": {"errors", "config", "runtime"},
    "tracking": {"errors", "runtime"},
    "tasks": {"errors", "training"},
    "verify": {"errors", "config", "runtime", "training"},
    "doctor": {"errors", "config", "runtime"},
    "search": {"errors", "config", "runtime", "training", "tasks"},
    "notebooks": {"errors", "config", "runtime"},
    "pipeline": {"errors", "config", "runtime", "notebooks"},
    "lint": {"errors", "notebooks"},
    "hosts": {"errors", "config", "runtime", "notebooks"},
    "relay": {"errors", "config", "runtime", "training", "tracking"},
    "report": {"errors", "runtime", "search"},
    "views": {"errors", "runtime", "search", "report"},
    "dashboards": {"errors", "runtime", "tracking", "search", "views"},
    "panel": {
        "errors",
        "config",
        "runtime",
        "notebooks",
        "search",
        "report",
        "tasks",
        "views",
        "dashboards",
    },
    "cli": {"errors", "config", "runtime"},
    "cli_hosts": {"cli"},
    "cli_panel": {"cli", "errors"},
    "__main__": {"errors"},
}

# Modules of the configuration room, which has no folder of its own.
CONFIG = ("config", "direction", "names", "yaml_lines")

# Against the stream, inside a function and for a reason.
LATE = {
    ("__main__", "cli"): "without typer, its verbs cannot even be loaded",
    ("__main__", "cli_hosts"): "without typer, its verbs cannot even be loaded",
    ("cli", "doctor"): "each verb loads what it runs",
    ("cli", "notebooks.handle"): "each verb loads what it runs",
    ("cli", "notebooks.parameters"): "each verb loads what it runs",
    ("cli", "notebooks.run"): "each verb loads what it runs",
    ("cli", "notebooks.slow_import"): "each verb loads what it runs",
    ("cli", "pipeline.run"): "each verb loads what it runs",
    ("cli", "relay.pack"): "each verb loads what it runs",
    ("cli", "relay.unpack"): "each verb loads what it runs",
    ("cli", "report.report"): "each verb loads what it runs",
    ("cli", "search.cross_validation"): "each verb loads what it runs",
    ("cli", "search.folds"): "each verb loads what it runs",
    ("cli", "search.make_folds"): "each verb loads what it runs",
    ("cli", "search.sweep"): "each verb loads what it runs",
    ("cli", "tasks.find"): "each verb loads what it runs",
    ("__main__", "cli_panel"): "without typer, its verbs cannot even be loaded",
    ("cli_panel", "panel.press"): "each verb loads what it runs",
    ("cli_panel", "runtime.paths"): "each verb loads what it runs",
    ("cli_panel", "runtime.result"): "each verb loads what it runs",
    ("cli_panel", "views.page"): "each verb loads what it runs",
    ("cli_panel", "views.state"): "each verb loads what it runs",
    ("cli_hosts", "hosts.bundle"): "each verb loads what it runs",
    ("cli_hosts", "hosts.kaggle_kernel"): "each verb loads what it runs",
    ("cli_hosts", "lint.report"): "each verb loads what it runs",
    ("cli_hosts", "notebooks.parameters"): "each verb loads what it runs",
    ("config", "runtime.host"): 'env="auto" asks where it runs, and only then',
    ("config_values", "runtime.host"): "{scratch} in runtime.output_dir asks where it runs",
    (
        "runtime.keeper",
        "tracking",
    ): "the owner tells the trackers; without one, this process does",
    (
        "runtime.zygote",
        "tracking",
    ): "the process that tracks is forked where torch is warm",
    ("runtime.launch", "views.live"): "what a cell shows is drawn from the run's folder",
    ("runtime.result", "views.live"): "what a cell shows is drawn from the run's folder",
    ("search.cross_validation", "views.live"): "what a cell shows is drawn from its folder",
    ("search.sweep", "views.live"): "what a cell shows is drawn from its folder",
    ("runtime.result", "relay.deadline"): "a run that ended at its deadline is packed",
    ("runtime.result", "search.attach"): "nb.attach(folder) of a sweep",
    (
        "runtime.zygote",
        "search.conductor",
    ): "the process that conducts is forked where torch is warm",
    ("runtime.result", "training.checkpoint"): "result.load_into(model)",
    ("search.start", "tracking"): "what will be tracked is chosen, and said, before the start",
    ("runtime.takeoff", "tracking"): "what will be tracked is chosen, and said, before the start",
}

# Stations of the data's way. Loading one loads none that comes later.
STATIONS = [
    {"errors", "yaml_lines"},
    {"config"},
    {"runtime.host", "runtime.hardware"},
    {"runtime.plan"},
    {"runtime.context"},
    {"runtime.pilot", "runtime.worker", "runtime.owner"},
    {"runtime.launchpad", "runtime.takeoff", "runtime.keeper", "runtime.launch"},
]

# What the kernel loads for a launch; torch and its kind are for the ranks.
KERNEL = ["config", "doctor", "runtime.launch", "runtime.takeoff", "runtime.result"]
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


MODULES = {_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


@functools.cache
def _imports(module: str, *, late: bool) -> frozenset[str]:
    """Modules that a module imports when it is loaded, or (late) inside its functions."""
    return frozenset(_found(MODULES[module], late=late, inside=False))


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


def _room(module: str) -> str:
    top = module.partition(".")[0]
    return "config" if top.startswith(CONFIG) else top


@functools.cache
def _loads(module: str) -> set[str]:
    """Every module of ours that loading a module loads."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        here = todo.pop()
        if here in MODULES and here not in seen:
            seen.add(here)
            todo += _imports(here, late=False)
    return seen


def test_a_room_imports_only_rooms_before_it() -> None:
    wrong = {module: _against_the_stream(module, late=False) for module in MODULES}
    assert {module: found for module, found in wrong.items() if found} == {}


def test_what_is_imported_late_against_the_stream_is_listed_with_a_reason() -> None:
    found = {
        (module, one)
        for module in set(MODULES) - {"nbtoolkit"}
        for one in _against_the_stream(module, late=True)
    }
    assert found - set(LATE) == set()


def _against_the_stream(module: str, *, late: bool) -> set[str]:
    """What a module imports of rooms that it may not."""
    allowed = ROOMS[_room(module)] | {_room(module), "nbtoolkit"}
    return {one for one in _imports(module, late=late) & set(MODULES) if _room(one) not in allowed}


def test_the_list_of_late_imports_is_not_longer_than_needed() -> None:
    assert [pair for pair in LATE if pair[1] not in _imports(pair[0], late=True)] == []


@pytest.mark.parametrize("number", range(len(STATIONS)))
def test_no_station_loads_a_later_one(number: int) -> None:
    later = set().union(*STATIONS[number + 1 :])
    for station in STATIONS[number]:
        assert not _loads(station) & later


def test_no_module_loads_itself_in_a_circle() -> None:
    for module in MODULES:
        others = _imports(module, late=False) & set(MODULES) - {module}
        assert not [one for one in others if module in _loads(one)], module


@pytest.mark.parametrize("module", KERNEL)
def test_what_the_kernel_loads_imports_nothing_heavy(module: str) -> None:
    for loaded in _loads(module):
        roots = {name.partition(".")[0] for name in _imports(loaded, late=False)}
        assert not roots & HEAVY, loaded
