"""Every setting of a sweep's file has an effect: two values differ in its study or its jobs."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
import pytest
from every_field import PROVEN, proves
from machines import T4, cpu_machine, machine
from searches import LR, Fake, algorithm, drive

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import SpaceError, SweepError
from nbtoolkit.search.pool import JobResult, SearchJob
from nbtoolkit.search.slots import make_slots
from nbtoolkit.search.study.study import FILE, read_study
from nbtoolkit.search.study.sweep_config import load_sweep_config
from nbtoolkit.search.sweep import configured_folds
from nbtoolkit.worker.context import RunContext

Source = dict[str, Any]

SPACE = {"optim.lr": LR, "model.width": {"type": "int", "low": 1, "high": 64}}
RANDOM: Source = {"sampler": "random", "pruner": "none"}


def metrics(job: SearchJob, step: int) -> dict[str, float]:
    """The loss falls and rises again; the gain is the other way round."""
    loss = float(job.params["optim.lr"]) + abs(step - 1)
    return {"val_loss": loss, "val_gain": -loss, "latency_ms": 100 * float(job.params["optim.lr"])}


class Searched:
    """A search without processes: the jobs it ran, what it said, what the study holds."""

    def __init__(
        self, folder: Path, source: Source, fake: Fake | None = None, **drive_: Any
    ) -> None:
        folder.mkdir()
        self.made, self.diary = algorithm(folder, source)
        self.error = ""
        try:
            self.jobs = drive(self.made, fake or Fake(metrics), **drive_)
            self.summary = self.made.end().summary
        except SweepError as error:
            self.error = str(error)
        self._folder = folder

    @cached_property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return stored(self._folder)

    @property
    def params(self) -> list[dict[str, Any]]:
        return [trial.params for trial in self.trials]


def stored(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return read_study(folder / FILE).trials


class Search:
    """Searches in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(
        self,
        n: int = 3,
        *,
        study: Source | None = None,
        fake: Fake | None = None,
        budget: Source | None = None,
        left: float | None = None,
        slots: int = 1,
        **more: Any,
    ) -> Searched:
        self._count += 1
        source = {
            "study": {**RANDOM, **(study or {})},
            "budget": {"n_trials": n, **(budget or {})},
            "space": SPACE,
            **more,
        }
        return Searched(self._folder / str(self._count), source, fake, left=left, slots=slots)


@pytest.fixture
def search(tmp_path: Path) -> Search:
    return Search(tmp_path)


# --- study ---


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """What the searches of this section are compared with: no setting of its study is set."""
    search = Search(tmp_path_factory.mktemp("usual"))
    first, again = search(), search()
    assert again.params == first.params
    assert [one.value for one in again.trials] == [one.value for one in first.trials]
    return first


@proves("sweep: study.metric", "sweep: study.direction", "sweep: study.trial_value")
def test_the_metric_its_direction_and_its_report_make_the_value(
    search: Search, usual: Searched
) -> None:
    first = usual
    values = [trial.value for trial in first.trials]
    gains = search(study={"metric": "val_gain", "direction": "maximize"})
    assert [trial.value for trial in gains.trials] == [-value for value in values]
    assert gains.summary["best"] == first.summary["best"]
    other = search(study={"metric": "val_gain", "direction": "minimize"})
    assert other.summary["best"] != first.summary["best"]
    best = search(study={"trial_value": "best"})  # of the reports at steps 0, 1 and 2: step 1's
    assert [trial.value for trial in best.trials] == pytest.approx([v - 1 for v in values])


@proves("sweep: study.sampler", "sweep: study.seed", "sweep: study.sampler_options")
def test_sampler_options_and_seed_decide_what_is_drawn(search: Search, usual: Searched) -> None:
    drawn = usual.params
    assert drawn != search(study={"seed": 1}).params
    sobol = search(study={"sampler": "qmc"}).params
    assert drawn != sobol
    assert (
        sobol != search(study={"sampler": "qmc", "sampler_options": {"qmc_type": "halton"}}).params
    )


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes"])
def test_a_seed_among_the_samplers_options_is_refused(sampler: str) -> None:
    study = {"metric": "val_loss", "sampler": sampler, "sampler_options": {"seed": 5}}
    what = r"sampler_options: seed stands where study\.seed is meant[\s\S]*set study\.seed: 5"
    with pytest.raises(SpaceError, match=what):
        load_sweep_config({"study": study, "space": SPACE}, Config(), n_trials=2)


@pytest.mark.long  # test_sweep_algorithm.py has short ones
@proves("sweep: study.pruner", "sweep: study.pruner_options")
def test_the_pruner_and_its_options_end_trials(search: Search) -> None:
    def worse(job: SearchJob, step: int) -> dict[str, float]:
        return {"val_loss": float(job.key[-1]) * (step + 1)}

    def pruned(**study: Any) -> int:
        found = search(4, study=study, fake=Fake(worse))
        return sum(trial.state.name == "PRUNED" for trial in found.trials)

    options = {"n_startup_trials": 1}
    assert pruned() == pruned() == 0
    assert pruned(pruner="median", pruner_options=options) == 3
    assert pruned(pruner="median", pruner_options={"n_startup_trials": 3}) == 1


# --- budget ---


def failing(*keys: str) -> Fake:
    ending = JobResult(status="failed", fault="raised", error="boom", seconds=1.0)
    return Fake(metrics, endings=dict.fromkeys(keys, ending))


KEYS = [f"trials/{number:04d}" for number in range(6)]


@pytest.mark.long  # test_sweep_algorithm.py has short ones
@proves("sweep: budget.n_trials", "sweep: budget.max_failures", "sweep: budget.retries")
def test_trials_failures_and_retries_are_counted_as_set(search: Search) -> None:
    assert len(search(2).trials) == 2
    assert len(search(4).trials) == 4
    assert search(4, fake=failing(*KEYS[:2])).error == ""
    stopped = search(4, fake=failing(*KEYS[:2]), budget={"max_failures": 1})
    assert "trials have failed (2)" in stopped.error
    states = [
        [t.state.name for t in search(2, fake=failing(KEYS[0]), budget={"retries": n}).trials]
        for n in (0, 1)
    ]
    assert states == [["FAIL", "COMPLETE"], ["COMPLETE", "COMPLETE"]]


@proves("sweep: budget.reserve_for_refit")
def test_time_that_is_kept_back_ends_the_trials_sooner(search: Search) -> None:
    # A trial takes a second, and 6.5 are left.
    counts = [
        len(search(9, left=6.5, budget={"reserve_for_refit": seconds}).jobs)
        for seconds in (0.0, 4.0)
    ]
    assert counts == [6, 2]


def naps(config: Config, ctx: RunContext) -> dict[str, float]:
    for step in range(int(config.model.width)):
        time.sleep(0.05)
        ctx.report({"val_loss": config.optim.lr}, step=step)
    return {"val_loss": config.optim.lr}


def real(folder: Path, **source: Any) -> nb.SweepResult:
    pytest.importorskip("optuna")
    sweep_config = {"study": {"metric": "val_loss", **RANDOM}, "space": {"optim.lr": LR}, **source}
    settings = {
        "tracking.mlflow": False,
        "runtime.output_dir": str(folder),
        "model": {"width": 10_000},
    }
    return nb.sweep(naps, settings, sweep_config, display="off", resume="never")


@pytest.mark.long
@proves("sweep: budget.timeout", "sweep: budget.trial_timeout", "sweep: study.name")
def test_a_sweep_and_a_trial_end_in_time(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"its time of 1 s is used up"):
        real(tmp_path, budget={"n_trials": 1, "trial_timeout": 1})
    begun = time.monotonic()
    study = {"metric": "val_loss", **RANDOM, "name": "mine"}
    result = real(tmp_path, budget={"n_trials": 1, "timeout": 2}, study=study)
    assert result.status == "deadline"
    assert time.monotonic() - begun < 60
    assert "-mine-" in result.paths.folder.name
    assert result.study.study_name == "mine"


# --- where, and on what ---


@proves("sweep: placement", "sweep: trials_per_device")
def test_trials_are_placed_as_set() -> None:
    gpus = machine(T4, T4)

    def names(placement: Any, per_device: int = 1) -> list[str]:
        sweep_config = load_sweep_config(
            {"space": SPACE, "placement": placement, "trials_per_device": per_device},
            Config(),
            n_trials=4,
        )
        made = make_slots(
            Config(),
            gpus,
            sweep_config.placement,
            per_device=sweep_config.trials_per_device,
            jobs=4,
        )
        return [slot.name for slot in made.slots]

    assert names("auto") == ["cuda:0", "cuda:1"]
    assert names("all_devices_per_trial") == ["all devices"]
    assert len(names("auto", per_device=2)) == 4
    assert len(make_slots(Config(), cpu_machine(), "auto").slots) >= 1


FOLDS = {
    "k": ({"k": 2}, {"k": 3}),
    "kind": ({"k": 2}, {"k": 2, "kind": "kfold"}),
    "repeats": ({"k": 2}, {"k": 2, "repeats": 2}),
    "seed": ({"k": 2}, {"k": 2, "seed": 1}),
}
PROVEN.extend([*(f"sweep: folds.{name}" for name in FOLDS), "sweep: folds.file"])
TARGETS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2]


def folds_of(settings: Source) -> Any:
    sweep_config = load_sweep_config({"space": SPACE, "folds": settings}, Config(), n_trials=1)
    return configured_folds(sweep_config.folds, "__main__:train", TARGETS, None)


@pytest.mark.parametrize("name", FOLDS)
def test_folds_are_divided_as_set(name: str) -> None:
    first, second = FOLDS[name]
    assert folds_of(first) == folds_of(first)
    assert folds_of(first) != folds_of(second)


def test_folds_of_a_file_are_those_that_were_saved(tmp_path: Path) -> None:
    folds = nb.make_folds(TARGETS, k=3, seed=7)
    folds.save(tmp_path / "folds.json")
    assert folds_of({"file": str(tmp_path / "folds.json")}) == folds


# --- what is searched, and what else counts ---


@proves("sweep: space", "sweep: first_trials")
def test_space_and_first_trials_decide_the_parameters(search: Search) -> None:
    assert {*search(1).params[0]} == {"optim.lr", "model.width"}
    assert {*search(1, space={"optim.lr": LR}).params[0]} == {"optim.lr"}
    first = search(2, first_trials=[{"optim.lr": 0.25}]).params
    assert [one["optim.lr"] == 0.25 for one in first] == [True, False]


@proves("sweep: constraints")
def test_a_trial_beyond_a_limit_is_not_the_best(search: Search) -> None:
    points = [{"optim.lr": lr, "model.width": 1} for lr in (0.1, 0.5)]
    study = {"metric": "val_gain", "direction": "maximize"}
    free = search(2, first_trials=points, study=study)
    limit = {"latency_ms": {"min": 30}}
    bound = search(2, first_trials=points, study=study, constraints=limit)
    assert (free.summary["best"], bound.summary["best"]) == (0, 1)


@pytest.mark.long  # test_sweep_algorithm.py has short ones
@proves("sweep: warm_start")
def test_trials_of_another_sweep_are_taken_over(search: Search, tmp_path: Path) -> None:
    first = search(2)
    warm = search(1, warm_start=str(tmp_path / "1"))
    assert [trial.value for trial in warm.trials[:2]] == [trial.value for trial in first.trials]
    assert len(warm.trials) == 3
