"""Every setting has an effect: two values differ in plan, run folder or result.

This file also checks, by reflection over both schemas, that some test names each field. Settings of
nb.fit are in test_every_field_fit.py, those of a sweep in test_every_field_sweep.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from every_field import PROVEN, leaves, proves
from machines import T4, cpu_machine, machine, machine_of_age
from records import ended_runs
from torch import nn
from torch.nn import functional as F
from tracked_runs import all_runs, client_of, follow, whole_run
from wandb_files import offline_runs

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.deadline import time_limit
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import GroupNotFormed, make_plan
from nbtoolkit.errors import DeadlinePassed, GroupStartFailed, WorkerHung
from nbtoolkit.host import detect_host
from nbtoolkit.panel.cost import quota_cost
from nbtoolkit.run.events import EventReader
from nbtoolkit.search.study.sweep_config import SweepConfig
from nbtoolkit.worker.context import RunContext

Settings = dict[str, Any]


def test_every_field_of_both_schemas_is_proven_once() -> None:
    """The section ``cluster`` has a test of its own, beside the extra."""
    for name in ("test_every_field_fit", "test_every_field_sweep"):
        import_module(name)
    schema = [name for name in leaves(Config) if not name.startswith("cluster.")]
    schema += [f"sweep: {name}" for name in leaves(SweepConfig)]
    assert len(schema) > 100
    proven = Counter(name for name in PROVEN if not name.startswith("cluster."))
    assert [name for name in schema if name not in proven] == [], "no test shows their effect"
    assert [name for name in proven if name not in schema] == [], "no schema has them"
    assert [name for name, times in proven.items() if times > 1] == [], "stand in two places"


# --- the plan of a machine that is given ---


@dataclass(frozen=True)
class Planned:
    name: str
    first: Any
    second: Any
    look: Callable[[LaunchPlan], Any]
    found: tuple[Any, Any]
    common: Settings = field(default_factory=dict)
    gpus: int = 2


PER_DEVICE: Settings = {"train.batch_size_per_device": 8}
PLANS = [
    Planned(
        "optim.lr_rule", "none", "sqrt", lambda plan: plan.lr_factor, (1.0, 2**0.5), PER_DEVICE
    ),
    Planned("train.batch_size", 64, 32, lambda plan: plan.global_batch_size, (64, 32)),
    Planned("train.batch_size_per_device", 8, 16, lambda plan: plan.global_batch_size, (16, 32)),
    Planned("train.precision", "auto", "fp32", lambda plan: plan.precision, ("fp16", "fp32")),
    Planned(
        "train.gradient_accumulation_steps", 1, 4, lambda plan: plan.batch_size_per_device, (64, 16)
    ),
    Planned("distributed.enabled", "auto", True, lambda plan: plan.processes, (1, 2), gpus=0),
    Planned("distributed.strategy", "auto", "single", lambda plan: plan.processes, (2, 1)),
    Planned("distributed.world_size", "auto", 1, lambda plan: plan.processes, (2, 1)),
    Planned("distributed.backend", "auto", "gloo", lambda plan: plan.backend, ("nccl", "gloo")),
    Planned("distributed.device_ids", None, [1], lambda plan: len(plan.devices), (2, 1)),
    Planned("distributed.port", "auto", 23456, lambda plan: plan.port, (None, 23456)),
    Planned("runtime.restarts", 0, 3, lambda plan: plan.restarts, (0, 3)),
    Planned("distributed.timeout", 1800, 900, lambda plan: plan.group_timeout, (1800.0, 900.0)),
]
PROVEN.extend(case.name for case in PLANS)


@pytest.mark.parametrize("case", PLANS, ids=lambda case: case.name)
def test_two_values_are_planned_differently(case: Planned) -> None:
    hardware = machine(*[T4] * case.gpus) if case.gpus else cpu_machine()
    told = []
    for value in (case.first, case.second):
        settings = {**case.common, case.name: value}
        if "train.batch_size_per_device" not in settings:
            settings = {"train.batch_size": 128, **settings}
        told.append(
            make_plan(nb.load_config(env=None, overrides=settings), detect_host(), hardware)
        )
    assert tuple(map(case.look, told)) == case.found


@proves("distributed.fallback")
def test_without_a_fallback_a_group_that_fails_is_an_error() -> None:
    def plan(value: bool) -> LaunchPlan:
        config = nb.load_config(env=None, overrides={"distributed.fallback": value})
        failure = GroupNotFormed("the ranks did not meet")
        return make_plan(config, detect_host(), machine(T4, T4), (failure,))

    assert plan(True).processes == 1
    with pytest.raises(GroupStartFailed, match=r"did not meet[\s\S]*set distributed\.fallback"):
        plan(False)


# --- two ranks ---


class Counting(nn.Module):
    """Its buffer counts up by another number on every rank."""

    seen: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), rank
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1 + self.rank
        return self.inner(x)


def on_two_ranks(config: Config, ctx: RunContext) -> dict[str, Any]:
    """What the step of a fit sees of DDP on this rank, and what gradients travelled as."""
    own = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0 + ctx.rank)
    own(torch.ones(1, 1)).sum().backward()
    optimizer.step()  # another model on each rank: what runtime.compare_ranks looks for
    found: dict[str, Any] = {"buffers": []}

    def step(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found["options"] = {
            "distributed.find_unused_parameters": model.find_unused_parameters,
            "distributed.gradient_as_bucket_view": model.gradient_as_bucket_view,
            "distributed.bucket_cap_mb": model.bucket_bytes_cap / 2**20,
            "distributed.static_graph": model.static_graph,
        }
        outputs = model(batch[0])
        found["buffers"].append(model.module.seen.item())
        return outputs, batch[1]

    fitted(ctx, config, step=step)
    if not config.distributed.static_graph:
        for kind, rank in (("none", 1), ("none", 1), ("fp16", 1), ("powersgd", 1), ("powersgd", 2)):
            more = {"distributed.compression": kind, "distributed.powersgd_rank": rank}
            found.setdefault(f"{kind} {rank}", []).append(fitted(ctx, config.with_overrides(more)))
    ctx.print(f"rank {ctx.rank} is through")
    return found


def fitted(ctx: RunContext, config: Config, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model, data = Counting(ctx.rank), torch.randn(32, 16)
    nb.fit(ctx, config, model, (data, data.flip(1)), None, loss=F.mse_loss, **options)
    numbers: list[float] = model.inner[0].weight.flatten().tolist()
    return numbers


DDP = {
    "distributed.find_unused_parameters": (False, True),
    "distributed.gradient_as_bucket_view": (True, False),
    "distributed.bucket_cap_mb": (25.0, 5.0),
    "distributed.static_graph": (False, True),
}
ON_RANKS = {
    **DDP,
    "distributed.broadcast_buffers": (True, False),
    "distributed.sync_batchnorm": (False, True),
    "runtime.compare_ranks": (True, False),
}
# tests/training/test_strategies.py shows what they mean.
PROVEN.extend(["distributed.zero_stage", "distributed.offload"])
PROVEN.extend([*ON_RANKS, "distributed.compression", "distributed.powersgd_rank"])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[nb.RunResult]:
    """A launch with the first values of ON_RANKS, and one with the second ones."""
    base: Settings = {
        "train.batch_size": 8,
        "train.epochs": 3,
        "checkpoint.enabled": False,
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path_factory.mktemp("every-field")),
    }
    return [
        nb.launch(
            on_two_ranks,
            {**base, **{name: values[turn] for name, values in ON_RANKS.items()}},
            processes=2,
            display="off",
        )
        for turn in (0, 1)
    ]


@pytest.mark.parametrize("name", DDP)
def test_ddp_gets_its_options(name: str, two_ranks: list[nb.RunResult]) -> None:
    assert tuple(result.value["options"][name] for result in two_ranks) == DDP[name]


def test_ddp_copies_buffers_or_not(two_ranks: list[nb.RunResult]) -> None:
    copied, own = (result.values[1]["buffers"] for result in two_ranks)
    assert own == [2.0 * step for step in range(1, 13)]  # rank 1 counts in twos
    # Rank 0 counts in ones, and rank 1 adds its own two to what it gets before every step.
    assert copied == [float(step + 1) for step in range(1, 13)]


def test_gradients_travel_compressed(two_ranks: list[nb.RunResult]) -> None:
    value = two_ranks[0].value
    plain, again = value["none 1"]
    assert again == plain
    found = [plain, *(value[name][0] for name in ("fp16 1", "powersgd 1", "powersgd 2"))]
    assert len({tuple(numbers) for numbers in found}) == 4


def test_batch_norms_over_ranks_are_said_to_be_for_gpus(two_ranks: list[nb.RunResult]) -> None:
    logs = [result.paths.log(0).read_text() for result in two_ranks]
    assert ["rank 0 is through" in log for log in logs] == [True, True]
    assert ["sync_batchnorm is ignored" in log for log in logs] == [False, True]


def test_ranks_are_compared_or_not(two_ranks: list[nb.RunResult]) -> None:
    warned = ["train different models" in notes(result) for result in two_ranks]
    assert warned == [True, False]


def notes(result: nb.RunResult) -> str:
    events = EventReader(result.paths.events).read()
    return "\n".join(event.text for event in events if event.type == "note")


# --- one rank: what any function sees ---


def tells(config: Config, ctx: RunContext) -> dict[str, Any]:
    drawn = torch.rand(1).item()
    return {"drawn": drawn, "width": config.model.width, "file": config.data.file}


@proves("seed", "model", "data", "runtime.output_dir")
def test_what_any_function_sees_differs(tmp_path: Path) -> None:
    def run(turn: int, folder: str) -> nb.RunResult:
        settings = {
            "seed": turn,
            "model": {"width": turn},
            "data": {"file": f"{turn}.csv"},
            "tracking.mlflow": False,
            "runtime.output_dir": str(tmp_path / folder),
        }
        return nb.launch(tells, settings, processes=1, display="off", resume="never")

    first, again, second = run(0, "a"), run(0, "a"), run(1, "b")
    assert first.value == again.value
    assert first.value["drawn"] != second.value["drawn"]
    assert (first.value["width"], second.value["width"]) == (0, 1)
    assert (first.value["file"], second.value["file"]) == ("0.csv", "1.csv")
    places = [result.paths.folder.parent.name for result in (first, again, second)]
    assert places == ["a", "a", "b"]


def takes_seconds(config: Config, ctx: RunContext) -> None:
    time.sleep(6)  # the devices are looked at every 5 s


@pytest.mark.long
@proves("tracking.device_metrics")
def test_devices_are_looked_at_or_not(tmp_path: Path) -> None:
    for looks in (True, False):
        tracking = {"mlflow": False, "device_metrics": looks}
        settings: Settings = {"tracking": tracking, "runtime.output_dir": str(tmp_path)}
        result = nb.launch(takes_seconds, settings, processes=1, display="off")
        types = {event.type for event in EventReader(result.paths.events).read()}
        assert ("device" in types) == looks


def ten_reports(config: Config, ctx: RunContext) -> None:
    for step in range(10):
        ctx.report({"step": float(step)}, step=step)
        time.sleep(0.03)


@proves("runtime.time_budget", "runtime.pack")
def test_a_run_ends_in_time_and_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(**runtime: Any) -> tuple[str, int]:
        settings = {"tracking": {"mlflow": False}, "runtime": {"output_dir": "out", **runtime}}
        result = nb.launch(ten_reports, settings, start="inline", display="off", resume="never")
        return result.status, len([one for one in tmp_path.iterdir() if one.is_file()])

    assert run() == ("completed", 0)
    assert run(time_budget=0.1, pack=False) == ("deadline", 0)
    status, files = run(time_budget=0.1, pack=True)
    assert status == "deadline"
    assert files >= 1


@proves("runtime.session_limit", "runtime.shutdown_margin")
def test_a_session_of_a_given_age_ends_as_set(tmp_path: Path) -> None:
    root, now = machine_of_age(tmp_path, 1000.0), 1e9

    def left(**runtime: Any) -> float | None:
        config = Config().with_overrides({"runtime": runtime})
        deadline = time_limit(config, root=root, now=now, environ={}).deadline
        return None if deadline is None else round(deadline - now)

    assert left(session_limit=None) is None
    assert left(session_limit=5000, shutdown_margin=100) == 3900
    assert left(session_limit=6000, shutdown_margin=100) == 4900
    assert left(session_limit=5000, shutdown_margin=600) == 3400


@proves("runtime.deadline")
def test_a_deadline_counts_from_the_start_of_the_process(tmp_path: Path) -> None:
    began = psutil.Process().create_time()
    config = Config().with_overrides({"runtime.deadline": 1000, "runtime.time_budget": 5000})
    limit = time_limit(config, root=tmp_path, now=began + 100, environ={})
    assert limit.deadline == pytest.approx(began + 900)  # 10% of it are in reserve
    with pytest.raises(DeadlinePassed, match=r"nothing new starts \(runtime.deadline\)"):
        nb.launch(ten_reports, {"runtime": {"deadline": 0.001, "output_dir": str(tmp_path / "o")}})
    assert not (tmp_path / "o").exists()


def one_sleeps(config: Config, ctx: RunContext) -> None:
    if ctx.rank == 1:
        time.sleep(4)
    ctx.report({"done": 1.0})


@pytest.mark.long
@proves("runtime.hang_timeout")
def test_a_rank_is_silent_for_too_long_or_not(tmp_path: Path) -> None:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    options: Settings = {"processes": 2, "display": "off", "resume": "never"}
    with pytest.raises(WorkerHung, match="rank 1 sent nothing"):
        nb.launch(one_sleeps, {**settings, "runtime.hang_timeout": 1}, **options)
    result = nb.launch(one_sleeps, {**settings, "runtime.hang_timeout": 60}, **options)
    assert result.status == "completed"


MODULE = """
def one(config, ctx): return {"who": 1.0}
def two(config, ctx): return {"who": 2.0}
"""


@pytest.mark.long
@proves("task")
def test_the_command_line_calls_the_task(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    for name, who in (("one", 1.0), ("two", 2.0)):
        settings = {"task": f"mine:{name}", "tracking.mlflow": False, "runtime.output_dir": name}
        config = nb.load_config(env=None, overrides=settings)
        (tmp_path / f"{name}.yaml").write_text(config.to_yaml())
        command = [sys.executable, "-m", "nbtoolkit", "train", f"{name}.yaml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        (folder,) = ended_runs(tmp_path / name)
        assert nb.attach(folder).result().metrics["who"] == who


@proves("runtime.quota_hours")
def test_the_cost_is_told_of_the_quota_that_is_set() -> None:
    job = {"jobs": 2, "seconds": 3600.0, "slots": 1, "devices": 1}
    assert quota_cost(Config(), "kaggle", **job) == ""
    config = Config().with_overrides({"runtime.quota_hours": 20})
    assert quota_cost(config, "kaggle", **job) == "about 2 of your 20 GPU hours"


# --- tracking ---


@proves("tracking.wandb", "tracking.wandb_project")
def test_wandb_is_told_as_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    def told(folder: str, **tracking: Any) -> Path:
        settings = Config().with_overrides({"tracking": tracking}).to_dict()["tracking"]
        paths = whole_run(tmp_path / folder, tracking=settings)
        follow(paths)
        return paths.folder

    assert not (told("a", mlflow=False) / "wandb").exists()
    for folder, given, project in (
        ("b", {}, "nbtoolkit"),
        ("c", {"experiment": "e"}, "e"),
        ("d", {"experiment": "e", "wandb_project": "mine"}, "mine"),
    ):
        (run,) = offline_runs(told(folder, mlflow=False, wandb=True, **given)).values()
        assert run.project == project


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
@proves("tracking.mlflow", "tracking.tensorboard", "tracking.uri", "tracking.experiment")
def test_trackers_are_told_as_set(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")

    def told(folder: str, **tracking: Any) -> Path:
        settings = Config().with_overrides({"tracking": tracking}).to_dict()["tracking"]
        paths = whole_run(tmp_path / folder, tracking=settings)
        follow(paths)
        return paths.folder

    nobody = told("a", mlflow=False)
    assert not (tmp_path / "a" / "mlflow.db").exists()
    assert not (nobody / "tensorboard").exists()
    assert len([*(told("b", mlflow=False, tensorboard=True) / "tensorboard").iterdir()]) == 1
    told("c", experiment="mine")
    assert len(all_runs(tmp_path / "c")) == 1
    names = {one.name for one in client_of(tmp_path / "c").search_experiments()}
    assert "mine" in names
    assert "nbtoolkit" not in names
    (tmp_path / "e").mkdir()
    told("d", uri=f"sqlite:///{tmp_path}/e/mlflow.db")
    assert not (tmp_path / "d" / "mlflow.db").exists()
    assert len(all_runs(tmp_path / "e")) == 1
    assert "nbtoolkit" in {one.name for one in client_of(tmp_path / "e").search_experiments()}
