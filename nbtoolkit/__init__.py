"""nbtoolkit: one training function, any notebook, any number of devices.

Names load on first use, so that ``import nbtoolkit`` costs milliseconds and imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; at run time `__getattr__` does the same
    from nbtoolkit import errors as errors
    from nbtoolkit import verify as verify
    from nbtoolkit.config import Config as Config
    from nbtoolkit.config import load_config as load_config
    from nbtoolkit.dashboards.mlflow import open_mlflow as open_mlflow
    from nbtoolkit.dashboards.server import Dashboard as Dashboard
    from nbtoolkit.dashboards.study import open_dashboard as open_dashboard
    from nbtoolkit.doctor import doctor as doctor
    from nbtoolkit.errors import Leave as Leave
    from nbtoolkit.notebooks.handle import NotebookHandle as NotebookHandle
    from nbtoolkit.notebooks.publish import publish as publish
    from nbtoolkit.notebooks.result import NotebookResult as NotebookResult
    from nbtoolkit.notebooks.run import run_notebook as run_notebook
    from nbtoolkit.panel.panel import Panel as Panel
    from nbtoolkit.panel.panel import panel as panel
    from nbtoolkit.pipeline.result import PipelineResult as PipelineResult
    from nbtoolkit.pipeline.run import run_pipeline as run_pipeline
    from nbtoolkit.relay.pack import pack as pack
    from nbtoolkit.relay.result import PackResult as PackResult
    from nbtoolkit.relay.result import UnpackResult as UnpackResult
    from nbtoolkit.relay.unpack import unpack as unpack
    from nbtoolkit.report.report import report as report
    from nbtoolkit.runtime.context import RunContext as RunContext
    from nbtoolkit.runtime.hardware import Hardware as Hardware
    from nbtoolkit.runtime.hardware import detect_hardware as detect_hardware
    from nbtoolkit.runtime.host import Host as Host
    from nbtoolkit.runtime.host import detect_host as detect_host
    from nbtoolkit.runtime.launch import launch as launch
    from nbtoolkit.runtime.plan import LaunchPlan as LaunchPlan
    from nbtoolkit.runtime.plan import make_plan as make_plan
    from nbtoolkit.runtime.result import RunHandle as RunHandle
    from nbtoolkit.runtime.result import RunResult as RunResult
    from nbtoolkit.runtime.result import attach as attach
    from nbtoolkit.search.cross_validation import cross_validate as cross_validate
    from nbtoolkit.search.cv_result import CVResult as CVResult
    from nbtoolkit.search.folds import Folds as Folds
    from nbtoolkit.search.handle import SweepHandle as SweepHandle
    from nbtoolkit.search.make_folds import make_folds as make_folds
    from nbtoolkit.search.sweep import sweep as sweep
    from nbtoolkit.search.sweep_result import SweepResult as SweepResult
    from nbtoolkit.training.checkpoint import load_model as load_model
    from nbtoolkit.training.loop import fit as fit
    from nbtoolkit.training.metrics import over_all as over_all
    from nbtoolkit.training.prediction import predict as predict

__version__ = "0.1.0"

# Public name -> the module that has it.
_HOME = {
    "CVResult": "nbtoolkit.search.cv_result",
    "Config": "nbtoolkit.config",
    "Dashboard": "nbtoolkit.dashboards.server",
    "Folds": "nbtoolkit.search.folds",
    "Hardware": "nbtoolkit.runtime.hardware",
    "Host": "nbtoolkit.runtime.host",
    "LaunchPlan": "nbtoolkit.runtime.plan",
    "Leave": "nbtoolkit.errors",
    "NotebookHandle": "nbtoolkit.notebooks.handle",
    "NotebookResult": "nbtoolkit.notebooks.result",
    "PackResult": "nbtoolkit.relay.result",
    "Panel": "nbtoolkit.panel.panel",
    "PipelineResult": "nbtoolkit.pipeline.result",
    "RunContext": "nbtoolkit.runtime.context",
    "RunHandle": "nbtoolkit.runtime.result",
    "RunResult": "nbtoolkit.runtime.result",
    "SweepHandle": "nbtoolkit.search.handle",
    "SweepResult": "nbtoolkit.search.sweep_result",
    "UnpackResult": "nbtoolkit.relay.result",
    "attach": "nbtoolkit.runtime.result",
    "cross_validate": "nbtoolkit.search.cross_validation",
    "detect_hardware": "nbtoolkit.runtime.hardware",
    "detect_host": "nbtoolkit.runtime.host",
    "doctor": "nbtoolkit.doctor",
    "fit": "nbtoolkit.training.loop",
    "launch": "nbtoolkit.runtime.launch",
    "load_config": "nbtoolkit.config",
    "load_model": "nbtoolkit.training.checkpoint",
    "make_folds": "nbtoolkit.search.make_folds",
    "make_plan": "nbtoolkit.runtime.plan",
    "open_dashboard": "nbtoolkit.dashboards.study",
    "open_mlflow": "nbtoolkit.dashboards.mlflow",
    "over_all": "nbtoolkit.training.metrics",
    "pack": "nbtoolkit.relay.pack",
    "panel": "nbtoolkit.panel.panel",
    "predict": "nbtoolkit.training.prediction",
    "publish": "nbtoolkit.notebooks.publish",
    "report": "nbtoolkit.report.report",
    "run_notebook": "nbtoolkit.notebooks.run",
    "run_pipeline": "nbtoolkit.pipeline.run",
    "sweep": "nbtoolkit.search.sweep",
    "unpack": "nbtoolkit.relay.unpack",
}

# Modules that are public as they are.
_MODULES = ("errors", "verify")

__all__ = sorted([*_HOME, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import the public name ``name`` (PEP 562)."""
    if name in _MODULES:
        return import_module(f"nbtoolkit.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'nbtoolkit' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, those not yet loaded too, and no others."""
    return list(__all__)


class _Package(ModuleType):
    """This package: a submodule with the name of a public function does not hide that function."""

    def __setattr__(self, name: str, value: object) -> None:
        # `import nbtoolkit.doctor` makes the import system set `nbtoolkit.doctor` to the module.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
