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
    from nbtoolkit.archive.pack import PackResult as PackResult
    from nbtoolkit.archive.pack import pack as pack
    from nbtoolkit.archive.unpack import UnpackResult as UnpackResult
    from nbtoolkit.archive.unpack import unpack as unpack
    from nbtoolkit.attach import attach as attach
    from nbtoolkit.config.schema import Config as Config
    from nbtoolkit.config.schema import load_config as load_config
    from nbtoolkit.crossval.cross_validation import cross_validate as cross_validate
    from nbtoolkit.crossval.cv_result import CVResult as CVResult
    from nbtoolkit.dashboards.mlflow_server import open_mlflow as open_mlflow
    from nbtoolkit.dashboards.server import Dashboard as Dashboard
    from nbtoolkit.dashboards.study_dashboard import open_dashboard as open_dashboard
    from nbtoolkit.doctor import doctor as doctor
    from nbtoolkit.environment.hardware import Hardware as Hardware
    from nbtoolkit.environment.hardware import detect_hardware as detect_hardware
    from nbtoolkit.environment.launch_plan import LaunchPlan as LaunchPlan
    from nbtoolkit.environment.plan import make_plan as make_plan
    from nbtoolkit.errors import RunStopped as RunStopped
    from nbtoolkit.folds.folds import Folds as Folds
    from nbtoolkit.folds.make_folds import make_folds as make_folds
    from nbtoolkit.host import Host as Host
    from nbtoolkit.host import detect_host as detect_host
    from nbtoolkit.launcher.handle import RunHandle as RunHandle
    from nbtoolkit.launcher.handle import RunResult as RunResult
    from nbtoolkit.launcher.launch import launch as launch
    from nbtoolkit.notebooks.handle import NotebookHandle as NotebookHandle
    from nbtoolkit.notebooks.handle import NotebookResult as NotebookResult
    from nbtoolkit.notebooks.publish import publish as publish
    from nbtoolkit.notebooks.run import run_notebook as run_notebook
    from nbtoolkit.panel.panel import Panel as Panel
    from nbtoolkit.panel.panel import panel as panel
    from nbtoolkit.pipeline.run import PipelineResult as PipelineResult
    from nbtoolkit.pipeline.run import run_pipeline as run_pipeline
    from nbtoolkit.report.report import report as report
    from nbtoolkit.run.weights import load_model as load_model
    from nbtoolkit.search.sweep import sweep as sweep
    from nbtoolkit.search.sweep_result import SweepHandle as SweepHandle
    from nbtoolkit.search.sweep_result import SweepResult as SweepResult
    from nbtoolkit.training.evaluation import predict as predict
    from nbtoolkit.training.loop import fit as fit
    from nbtoolkit.training.metrics import epoch_metric as epoch_metric
    from nbtoolkit.worker.context import RunContext as RunContext

__version__ = "0.2.0"

# Public name -> the module that has it.
_HOME = {
    "CVResult": "nbtoolkit.crossval.cv_result",
    "Config": "nbtoolkit.config.schema",
    "Dashboard": "nbtoolkit.dashboards.server",
    "Folds": "nbtoolkit.folds.folds",
    "Hardware": "nbtoolkit.environment.hardware",
    "Host": "nbtoolkit.host",
    "LaunchPlan": "nbtoolkit.environment.launch_plan",
    "RunStopped": "nbtoolkit.errors",
    "NotebookHandle": "nbtoolkit.notebooks.handle",
    "NotebookResult": "nbtoolkit.notebooks.handle",
    "PackResult": "nbtoolkit.archive.pack",
    "Panel": "nbtoolkit.panel.panel",
    "PipelineResult": "nbtoolkit.pipeline.run",
    "RunContext": "nbtoolkit.worker.context",
    "RunHandle": "nbtoolkit.launcher.handle",
    "RunResult": "nbtoolkit.launcher.handle",
    "SweepHandle": "nbtoolkit.search.sweep_result",
    "SweepResult": "nbtoolkit.search.sweep_result",
    "UnpackResult": "nbtoolkit.archive.unpack",
    "attach": "nbtoolkit.attach",
    "cross_validate": "nbtoolkit.crossval.cross_validation",
    "detect_hardware": "nbtoolkit.environment.hardware",
    "detect_host": "nbtoolkit.host",
    "doctor": "nbtoolkit.doctor",
    "fit": "nbtoolkit.training.loop",
    "launch": "nbtoolkit.launcher.launch",
    "load_config": "nbtoolkit.config.schema",
    "load_model": "nbtoolkit.run.weights",
    "make_folds": "nbtoolkit.folds.make_folds",
    "make_plan": "nbtoolkit.environment.plan",
    "open_dashboard": "nbtoolkit.dashboards.study_dashboard",
    "open_mlflow": "nbtoolkit.dashboards.mlflow_server",
    "epoch_metric": "nbtoolkit.training.metrics",
    "pack": "nbtoolkit.archive.pack",
    "panel": "nbtoolkit.panel.panel",
    "predict": "nbtoolkit.training.evaluation",
    "publish": "nbtoolkit.notebooks.publish",
    "report": "nbtoolkit.report.report",
    "run_notebook": "nbtoolkit.notebooks.run",
    "run_pipeline": "nbtoolkit.pipeline.run",
    "sweep": "nbtoolkit.search.sweep",
    "unpack": "nbtoolkit.archive.unpack",
}

# Modules that are public as they are.
_MODULES = ("errors", "verify")

__all__ = sorted([*_HOME, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import the public name ``name`` (PEP 562)."""
    if name in _MODULES:
        return import_module(f"nbtoolkit.{name}")
    if name not in _HOME:
        import_module("nbtoolkit.config.aliases").refuse_old_name(f"nb.{name}")
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
