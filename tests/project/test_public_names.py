from __future__ import annotations

import ast
import copy
import importlib
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
from kernels import SECONDS
from whole import needs_extras

import nbtoolkit

HEAVY = ("torch", "mlflow", "optuna", "accelerate", "ipywidgets", "pydantic", "numpy", "yaml")


@pytest.mark.parametrize("name", nbtoolkit.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(nbtoolkit, name) is not None


def test_a_star_import_brings_every_name() -> None:
    scope: dict[str, object] = {}
    exec("from nbtoolkit import *", scope)
    assert {"launch", "sweep", "panel", "errors", "__version__"} <= set(scope)
    assert set(nbtoolkit.__all__) == set(scope) - {"__builtins__"}


@needs_extras
def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(nbtoolkit.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {name.asname: node.module for node in imports for name in node.names} == nbtoolkit._HOME


def test_a_copy_without_its_extras_has_the_names_of_the_core(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("extras", "__pycache__")
    shutil.copytree(Path(nbtoolkit.__file__).parent, tmp_path / "nbtoolkit", ignore=ignored)
    program = "import nbtoolkit as nb; print(hasattr(nb, 'detect_host'), hasattr(nb, 'blend'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nbtoolkit' has no attribute 'lunch'"):
        _ = nbtoolkit.lunch


def test_a_module_does_not_hide_the_function_of_its_name() -> None:
    importlib.import_module("nbtoolkit.doctor")
    assert callable(nbtoolkit.doctor)


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_the_package_is_pickled_by_name(dumps: Callable[[object], bytes]) -> None:
    assert pickle.loads(dumps({"nb": nbtoolkit}))["nb"] is nbtoolkit
    assert copy.deepcopy({"nb": nbtoolkit})["nb"] is nbtoolkit


def test_joblib_runs_a_function_of_a_script_that_uses_the_package() -> None:
    program = """
import joblib
import nbtoolkit as nb
def version(_): return nb.__version__
print(joblib.Parallel(2, backend="loky")(joblib.delayed(version)(n) for n in range(2)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout.strip() == str([nbtoolkit.__version__] * 2), done.stderr


def test_importing_costs_nothing() -> None:
    program = f"import sys, nbtoolkit; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert done.stdout.strip() == "[]"
