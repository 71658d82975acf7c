"""nbtoolkit: one training function, any notebook, any number of devices.

Names load on first use, so that ``import nbtoolkit`` costs milliseconds and imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from nbtoolkit.version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` imports the names
    from nbtoolkit import errors as errors
    from nbtoolkit import verify as verify
    from nbtoolkit.archive.pack import PackResult as PackResult
    from nbtoolkit.archive.pack import pack as pack
    from nbtoolkit.archive.unpack import UnpackResult as UnpackResult
    from nbtoolkit.archive.unpack import unpack as unpack
    from nbtoolkit.attach import attach as attach
    from nbtoolkit.competition.blend import Blend as Blend
    from nbtoolkit.competition.blend import blend as blend
    from nbtoolkit.competition.submission import check_submission as check_submission
    from nbtoolkit.config.schema import Config as Config
    from nbtoolkit.config.schema import load_config as load_config
    from nbtoolkit.crossval.cross_validation import cross_validate as cross_validate
    from nbtoolkit.crossval.cv_result import CVResult as CVResult
    from nbtoolkit.crossval.fold_predictions import FoldRun as FoldRun
    from nbtoolkit.crossval.fold_predictions import predict_mean as predict_mean
    from nbtoolkit.dashboards.mlflow_server import open_mlflow as open_mlflow
    from nbtoolkit.dashboards.server import Dashboard as Dashboard
    from nbtoolkit.dashboards.study_dashboard import open_dashboard as open_dashboard
    from nbtoolkit.doctor import doctor as doctor
    from nbtoolkit.environment.deadline import set_deadline as set_deadline
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
    from nbtoolkit.pipeline.runner import PipelineResult as PipelineResult
    from nbtoolkit.pipeline.runner import run_pipeline as run_pipeline
    from nbtoolkit.report.report import report as report
    from nbtoolkit.run.weights import load_model as load_model
    from nbtoolkit.search.sweep import sweep as sweep
    from nbtoolkit.search.sweep_result import SweepHandle as SweepHandle
    from nbtoolkit.search.sweep_result import SweepResult as SweepResult
    from nbtoolkit.training.callbacks import Callback as Callback
    from nbtoolkit.training.callbacks import FitState as FitState
    from nbtoolkit.training.evaluation import predict as predict
    from nbtoolkit.training.loop import fit as fit
    from nbtoolkit.training.metrics import epoch_metric as epoch_metric
    from nbtoolkit.tuning.batch_size import BatchSize as BatchSize
    from nbtoolkit.tuning.batch_size import find_batch_size as find_batch_size
    from nbtoolkit.tuning.benchmark import Benchmark as Benchmark
    from nbtoolkit.tuning.benchmark import benchmark as benchmark
    from nbtoolkit.tuning.calibration import Calibration as Calibration
    from nbtoolkit.tuning.calibration import calibrate as calibrate
    from nbtoolkit.tuning.learning_rate import LearningRate as LearningRate
    from nbtoolkit.tuning.learning_rate import find_learning_rate as find_learning_rate
    from nbtoolkit.tuning.quota import Quota as Quota
    from nbtoolkit.tuning.quota import quota as quota
    from nbtoolkit.tuning.speed import SpeedTable as SpeedTable
    from nbtoolkit.tuning.speed import find_num_workers as find_num_workers
    from nbtoolkit.tuning.speed import find_speedups as find_speedups
    from nbtoolkit.worker.context import RunContext as RunContext

# Module -> the public names that it defines.
_NAMES = {
    "archive.pack": ("PackResult", "pack"),
    "archive.unpack": ("UnpackResult", "unpack"),
    "attach": ("attach",),
    "competition.blend": ("Blend", "blend"),
    "competition.submission": ("check_submission",),
    "config.schema": ("Config", "load_config"),
    "crossval.cross_validation": ("cross_validate",),
    "crossval.cv_result": ("CVResult",),
    "crossval.fold_predictions": ("FoldRun", "predict_mean"),
    "dashboards.mlflow_server": ("open_mlflow",),
    "dashboards.server": ("Dashboard",),
    "dashboards.study_dashboard": ("open_dashboard",),
    "doctor": ("doctor",),
    "environment.deadline": ("set_deadline",),
    "environment.hardware": ("Hardware", "detect_hardware"),
    "environment.launch_plan": ("LaunchPlan",),
    "environment.plan": ("make_plan",),
    "errors": ("RunStopped",),
    "folds.folds": ("Folds",),
    "folds.make_folds": ("make_folds",),
    "host": ("Host", "detect_host"),
    "launcher.handle": ("RunHandle", "RunResult"),
    "launcher.launch": ("launch",),
    "notebooks.handle": ("NotebookHandle", "NotebookResult"),
    "notebooks.publish": ("publish",),
    "notebooks.run": ("run_notebook",),
    "panel.panel": ("Panel", "panel"),
    "pipeline.runner": ("PipelineResult", "run_pipeline"),
    "report.report": ("report",),
    "run.weights": ("load_model",),
    "search.sweep": ("sweep",),
    "search.sweep_result": ("SweepHandle", "SweepResult"),
    "training.callbacks": ("Callback", "FitState"),
    "training.evaluation": ("predict",),
    "training.loop": ("fit",),
    "training.metrics": ("epoch_metric",),
    "tuning.batch_size": ("BatchSize", "find_batch_size"),
    "tuning.quota": ("Quota", "quota"),
    "tuning.learning_rate": ("LearningRate", "find_learning_rate"),
    "tuning.speed": ("SpeedTable", "find_num_workers", "find_speedups"),
    "tuning.calibration": ("Calibration", "calibrate"),
    "tuning.benchmark": ("Benchmark", "benchmark"),
    "worker.context": ("RunContext",),
}
_HOME = {name: f"nbtoolkit.{module}" for module, names in _NAMES.items() for name in names}

# Public modules.
_MODULES = ("errors", "verify")

__all__ = sorted([*_HOME, *_MODULES, "__version__"])


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name in _MODULES:
        return import_module(f"nbtoolkit.{name}")
    if name not in _HOME:
        import_module("nbtoolkit.config.aliases").refuse_old_name(f"nb.{name}")
        raise AttributeError(f"module 'nbtoolkit' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return list(__all__)


class _Package(ModuleType):
    """The type of this package: a submodule cannot hide the public function of its name."""

    def __setattr__(self, name: str, value: object) -> None:
        # `import nbtoolkit.doctor` makes the import system set `nbtoolkit.doctor` to the module.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
