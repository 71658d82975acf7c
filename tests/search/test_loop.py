from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from searches import LR, SPACE, Fake, Killed, Memory, SweepSession, algorithm, drive

from nbtoolkit import load_config
from nbtoolkit.errors import SweepError
from nbtoolkit.run.events import Event, FoldChanged, RunStarted
from nbtoolkit.search.pool import JobResult, ParametersUnread, SearchJob
from nbtoolkit.search.study.study import FILE, read_study
from nbtoolkit.wire.messages import SearchCommand

TRIAL = ["trials/0000", "trials/0001", "trials/0002", "trials/0003"]


def loss(job: SearchJob, step: int) -> dict[str, float]:
    """The best learning rate is 0.01; every step is a little better than the one before."""
    return {"val_loss": (math.log10(job.params["optim.lr"]) + 2) ** 2 + 0.1 / (step + 1)}


def sweep(n: int = 4, *, budget: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A random search without a pruner, unless said otherwise."""
    study = {"sampler": "random", "pruner": "none", **more.pop("study", {})}
    return {"study": study, "budget": {"n_trials": n, **(budget or {})}, "space": SPACE, **more}


def stored(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return read_study(folder / FILE).trials


def ends(diary: Memory) -> dict[int, tuple[str, Any]]:
    return {number: (event.state, event.reason) for number, event in diary.ends().items()}


# --- what is run ---


def test_trials_are_run_and_the_best_is_named(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(4))
    jobs = drive(made, Fake(loss))
    assert [job.key for job in jobs] == TRIAL
    assert all(job.overrides == job.params for job in jobs)
    assert not any(job.judged for job in jobs)
    assert made.done
    summary = made.close("completed")
    values = {i: loss(job, 2)["val_loss"] for i, job in enumerate(jobs)}
    best = min(values, key=values.__getitem__)
    assert (summary["best"], summary["best_value"]) == (best, values[best])
    assert summary["best_params"] == jobs[best].params
    assert summary["counts"] == {"complete": 4}
    assert [trial.value for trial in stored(tmp_path)] == list(values.values())
    assert [event.best for event in diary.of("trial") if event.state == "complete"] == [
        values[i] == min(list(values.values())[: i + 1]) for i in range(4)
    ]


@pytest.mark.parametrize("sampler", ["random", "qmc", "grid"])
def test_a_trials_number_decides_its_parameters_on_any_number_of_slots(
    sampler: str, tmp_path: Path
) -> None:
    found = []
    for slots in (1, 3):
        folder = tmp_path / str(slots)
        folder.mkdir()
        space = (
            {"model.a": ["x", "y", "z"], "optim.lr": [0.1, 0.01]} if sampler == "grid" else SPACE
        )
        made, _ = algorithm(folder, {**sweep(6, study={"sampler": sampler}), "space": space})
        drive(made, Fake(loss), slots=slots)
        found.append([made.close("completed"), [t.params for t in stored(folder)]])
        assert [trial.value is not None for trial in stored(folder)] == [True] * 6
    assert found[0] == found[1]
    assert len({tuple(params.items()) for params in found[0][1]}) == 6


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_trial_asked_for_ahead_is_the_one_that_would_have_come(
    sampler: str, tmp_path: Path
) -> None:
    found = []
    for ahead in (False, True):
        folder = tmp_path / str(ahead)
        folder.mkdir()
        study = {"sampler": sampler, "sampler_options": {}}
        made, _ = algorithm(folder, sweep(14, study=study))
        jobs: list[SearchJob] = []
        while (job := made.next(None)) is not None:
            jobs.append(job)
            if ahead:
                made.prepare()
            ready = ahead and len(jobs) < {"random": 14, "tpe": 10}[sampler]
            assert len(stored(folder)) == len(jobs) + ready
            made.on_end(job, JobResult(status="completed", metrics=loss(job, 2), seconds=1.0))
        made.close("completed")
        found.append([job.params for job in jobs])
    assert found[0] == found[1]
    assert len(found[0]) == 14


def test_nothing_is_asked_ahead_of_what_the_sampler_learns_from(tmp_path: Path) -> None:
    study = {"sampler": "tpe", "sampler_options": {"n_startup_trials": 2}}
    made, _ = algorithm(tmp_path, sweep(9, study=study))
    made.next(None)
    for _ in range(3):
        made.prepare()
    assert len(stored(tmp_path)) == 2
    assert made.next(None) is not None
    made.prepare()
    assert len(stored(tmp_path)) == 2


def test_a_trial_asked_for_ahead_comes_first_in_the_next_session(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(3))
    first = made.next(None)
    assert first is not None
    made.prepare()
    made.on_end(first, JobResult(status="completed", metrics=loss(first, 2), seconds=1.0))
    made.stop()
    assert made.next(None) is None
    made.close("stopped")
    asked = stored(tmp_path)[1].params["optim.lr"]
    again, _ = algorithm(tmp_path, sweep(3))
    jobs = drive(again, Fake(loss))
    assert [job.key for job in jobs] == TRIAL[1:3]
    assert jobs[0].params["optim.lr"] == asked
    again.close("completed")


def test_tpe_on_one_slot_repeats_itself_from_scratch(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        study = {"sampler": "tpe", "sampler_options": {"n_startup_trials": 4}}
        made, _ = algorithm(folder, sweep(8, study=study))
        found.append([job.params for job in drive(made, Fake(loss))])
        made.close("completed")
    assert found[0] == found[1]


def test_a_grid_ends_when_every_point_was_tried(tmp_path: Path) -> None:
    space = {"model.a": ["x", "y"], "optim.lr": [0.1, 0.01]}
    source = {"study": {"sampler": "grid", "pruner": "none"}, "space": space}
    made, _ = algorithm(tmp_path, source)
    points = [tuple(job.params.values()) for job in drive(made, Fake(loss), slots=3)]
    assert points == [("x", 0.1), ("x", 0.01), ("y", 0.1), ("y", 0.01)]
    made.close("completed")


def test_first_trials_come_first_and_count(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(3, first_trials=[{"optim.lr": 0.01}]))
    jobs = drive(made, Fake(loss))
    assert len(jobs) == 3
    assert jobs[0].params["optim.lr"] == 0.01
    assert made.close("completed")["best"] == 0


# --- how it is judged ---


def test_a_hopeless_trial_is_pruned_at_a_report(tmp_path: Path) -> None:
    study = {"pruner": "median", "pruner_options": {"n_startup_trials": 2}}
    firsts = [{"optim.lr": 0.01}, {"optim.lr": 0.02}, {"optim.lr": 1.0}]
    made, diary = algorithm(tmp_path, sweep(3, study=study, first_trials=firsts))
    jobs = drive(made, Fake(loss))
    assert all(job.judged for job in jobs)
    assert [state for state, _ in ends(diary).values()] == ["complete", "complete", "pruned"]
    assert ends(diary)[2][1] == "at step 0, with val_loss 4.1"
    assert [event.step for event in diary.of("intermediate")] == [0, 1, 2, 0, 1, 2, 0]
    made.close("completed")


def test_steps_count_from_0_for_the_pruner_and_as_the_job_says_for_people(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1))
    job = made.next(None)
    assert job is not None
    made.on_names(job, first_step=1)  # as nb.fit, whose epochs count from 1
    for epoch in (1, 2):
        made.on_report(job, {"val_loss": 0.5}, epoch)
    assert [event.step for event in diary.of("intermediate")] == [1, 2]
    assert [*stored(tmp_path)[0].intermediate_values] == [0, 1]


def test_a_pruned_trial_that_was_through_counts(tmp_path: Path) -> None:
    study = {"pruner": "median", "pruner_options": {"n_startup_trials": 1}}
    firsts = [{"optim.lr": 0.01}, {"optim.lr": 1.0}]
    made, diary = algorithm(tmp_path, sweep(2, study=study, first_trials=firsts))
    one = made.next(None)
    assert made.on_report(one, {"val_loss": 0.1}, 0) is None
    made.on_end(one, JobResult(status="completed", metrics={"val_loss": 0.1}))
    two = made.next(None)
    assert made.on_report(two, {"val_loss": 4.1}, 0) == "pruned"
    made.on_report(two, {"val_loss": 4.0}, 1)  # before it leaves
    assert [event.step for event in diary.of("intermediate") if event.number == 1] == [0]
    made.on_end(two, JobResult(status="completed", metrics={"val_loss": 4.1}))
    assert ends(diary)[1] == ("complete", None)
    made.close("completed")


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"val_los": 0.5}, "no val_loss among the reported metrics: val_los"),
        ({}, "no val_loss among the reported metrics: none"),
        ({"val_loss": math.nan}, "val_loss is nan"),
        ({"val_loss": math.inf}, "val_loss is inf"),
        ({"val_loss": "0.5"}, "val_loss is '0.5', not a number"),
        ({"val_loss": True}, "val_loss is True, not a number"),
    ],
)
def test_a_metric_that_is_no_number_fails_the_trial(
    metrics: Any, reason: str, tmp_path: Path
) -> None:
    made, diary = algorithm(tmp_path, sweep(1))
    told = "no trial of the sweep has a value: 1 failed" if "val_loss" in metrics else "the metrics"
    with pytest.raises(SweepError, match=told):
        _end_and_close(made, JobResult(status="completed", metrics=metrics))
    assert ends(diary) == {0: ("failed", reason)}
    (trial,) = stored(tmp_path)
    assert (trial.state.name, trial.value) == ("FAIL", None)


def _end_and_close(made: SweepSession, ending: JobResult) -> None:
    made.on_end(made.next(None), ending)
    made.close("completed")


def test_a_report_that_is_nan_ends_its_trial_as_failed(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1, study={"pruner": "median"}))
    job = made.next(None)
    assert made.on_report(job, {"lr": 0.1}, 0) is None  # not every report has the metric
    assert made.on_report(job, {"val_loss": math.nan}, 1) == "pruned"
    made.on_end(job, JobResult(status="pruned"))
    assert ends(diary) == {0: ("failed", "val_loss is nan at step 1")}
    with pytest.raises(SweepError, match="no trial of the sweep has a value"):
        made.close("completed")


def test_the_best_report_may_be_the_value(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1, study={"trial_value": "best"}))
    worse = Fake(lambda job, step: {"val_loss": [0.3, 0.1, 0.2][step]})
    drive(made, worse)
    assert diary.ends()[0].value == 0.1
    made.close("completed")


def test_the_best_report_may_be_one_of_an_earlier_session(tmp_path: Path) -> None:
    source = sweep(1, study={"trial_value": "best"})
    first, _ = algorithm(tmp_path, source)
    first.on_report(first.next(), {"val_loss": 0.1}, 0)  # the session dies
    second, diary = algorithm(tmp_path, source)
    job = second.next()
    second.on_report(job, {"val_loss": 0.3}, 1)
    second.on_end(job, JobResult(status="completed", metrics={"val_loss": 0.3}))
    assert diary.ends()[0].value == 0.1
    second.close("completed")


def test_several_metrics_have_a_front(tmp_path: Path) -> None:
    study = {"metric": ["val_loss", "val_accuracy"], "pruner": "auto"}
    made, diary = algorithm(tmp_path, sweep(3, study=study))
    rows = [(0.5, 0.7), (0.4, 0.6), (0.6, 0.6)]
    drive(
        made,
        Fake(lambda job, step: dict(zip(study["metric"], rows[int(job.key[-1])], strict=True))),
    )
    summary = made.close("completed")
    assert (summary["front"], summary["best"]) == ([0, 1], None)
    assert diary.ends()[0].values == [0.5, 0.7]


def test_a_broken_limit_is_infeasible_and_never_best(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(2, constraints={"latency": {"max": 20}}))
    rows = [{"val_loss": 0.1, "latency": 25}, {"val_loss": 0.5, "latency": 15}]
    drive(made, Fake(lambda job, step: rows[int(job.key[-1])]))
    assert ends(diary) == {0: ("infeasible", "latency is 25, max 20"), 1: ("complete", None)}
    assert made.close("completed")["best"] == 1
    again, _ = algorithm(tmp_path, sweep(2, constraints={"latency": {"max": 20}}))
    assert again.close("completed")["best"] == 1


def test_without_a_feasible_trial_the_nearest_is_named_and_nothing_is_raised(
    tmp_path: Path,
) -> None:
    limits = {"latency": {"max": 20}, "recall": {"min": 0.5}}
    made, diary = algorithm(tmp_path, sweep(3, constraints=limits))
    rows = [(0.1, 25, 0.6), (0.5, 15, 0.45), (0.3, 19, 0.1)]  # 25%, 10% and 80% too far
    names = ("val_loss", "latency", "recall")
    drive(made, Fake(lambda job, step: dict(zip(names, rows[int(job.key[-1])], strict=True))))
    text = (
        "no trial meets the constraints (3 violate them); the nearest is trial 1: recall is 0.45, "
        "min 0.5"
    )
    summary = made.close("completed")
    assert (summary["infeasible"], summary["best"]) == (text, None)
    assert text in diary.notes()
    again, _ = algorithm(tmp_path, sweep(3, constraints=limits))
    assert again.close("completed")["infeasible"] == text


# --- faults ---


def test_out_of_memory_is_infeasible_and_does_not_end_the_sweep(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(4, budget={"max_failures": 0}))
    oom = JobResult(status="failed", fault="oom", error="CUDA out of memory")
    drive(made, Fake(loss, endings={TRIAL[1]: oom}))
    assert ends(diary)[1] == ("infeasible", "CUDA out of memory")
    assert made.close("completed")["counts"] == {"complete": 3, "infeasible": 1}


@pytest.mark.parametrize(("fault", "retried"), [("died", True), ("raised", True), ("nan", False)])
def test_a_fault_that_may_not_come_again_is_tried_again(
    fault: Any, retried: bool, tmp_path: Path
) -> None:
    made, diary = algorithm(tmp_path, sweep(2, budget={"retries": 1}))
    bad = JobResult(status="failed", fault=fault, error="a reason")
    jobs = drive(made, Fake(loss, endings={TRIAL[0]: bad}))
    keys = [TRIAL[0], TRIAL[0], TRIAL[1]] if retried else TRIAL[:2]
    assert [job.key for job in jobs] == keys
    assert ends(diary)[0] == (("complete", None) if retried else ("failed", "a reason"))
    made.close("completed")


def test_a_trial_is_not_tried_more_often_than_is_allowed(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1, budget={"retries": 1}))
    for _ in range(2):
        job = made.next(None)
        assert job is not None
        made.on_end(job, JobResult(status="failed", fault="raised", error="a reason"))
    assert made.done
    assert ends(diary) == {0: ("failed", "a reason")}


def test_a_parameter_that_nobody_reads_ends_the_sweep_in_its_first_trial_only(
    tmp_path: Path,
) -> None:
    made, diary = algorithm(tmp_path, sweep(2))
    one, two = made.next(), made.next()
    assert one is not None
    assert two is not None
    made.on_end(one, JobResult(status="completed", metrics={"val_loss": 0.5}))
    made.loop.handle(ParametersUnread(two, ["optim.lr"]))  # it ended early; the first has read it
    made.on_end(two, JobResult(status="completed", metrics={"val_loss": 0.4}))
    assert [state for state, _ in ends(diary).values()] == ["complete"] * 2
    made.close("completed")


def test_too_many_failures_end_the_sweep_when_nothing_runs_any_more(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(9, budget={"max_failures": 1}))
    jobs = [made.next(None) for _ in range(3)]
    bad = JobResult(status="failed", fault="raised", error="ValueError: no such layer")
    made.on_end(jobs[0], bad)
    made.on_end(jobs[1], bad)
    assert made.next(None) is None
    made.on_end(jobs[2], JobResult(status="completed", metrics={"val_loss": 0.5}))
    with pytest.raises(SweepError, match=r"failed \(2\); (.|\n)*no such layer(.|\n)*: 1"):
        made.next(None)
    assert [trial.state.name for trial in stored(tmp_path)] == ["FAIL", "FAIL", "COMPLETE"]


def test_failures_of_an_earlier_session_do_not_end_a_resumed_sweep(tmp_path: Path) -> None:
    bad = JobResult(status="failed", fault="raised", error="ValueError: no such layer")
    first, _ = algorithm(tmp_path, sweep(4, budget={"max_failures": 0}))
    with pytest.raises(SweepError, match="sweep again: the study resumes"):
        drive(first, Fake(loss, endings={TRIAL[0]: bad}))
    # The cause is mended.
    second, _ = algorithm(tmp_path, sweep(4, budget={"max_failures": 0}))
    assert [job.key for job in drive(second, Fake(loss))] == TRIAL[1:4]
    assert second.close("completed")["counts"] == {"failed": 1, "complete": 3}
    # One more failure in this session ends it again.
    third, _ = algorithm(tmp_path, sweep(6, budget={"max_failures": 0}))
    with pytest.raises(SweepError, match=r"trials have failed \(1\)"):
        drive(third, Fake(loss, endings={"trials/0004": bad}))


# --- sessions ---


def test_trials_of_a_dead_session_are_run_again_and_the_total_is_exact(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    made, _ = algorithm(whole, sweep(6))
    wanted = {job.key: job.params for job in drive(made, Fake(loss))}
    made.close("completed")

    first, _ = algorithm(tmp_path, sweep(6))
    cut = drive(first, Fake(loss), slots=2, jobs=4)  # two have ended, two run, and nobody closes
    second, diary = algorithm(tmp_path, sweep(6))
    rest = drive(second, Fake(loss), slots=2)
    assert [job.key for job in rest] == [*TRIAL[2:], "trials/0004", "trials/0005"]
    assert {job.key: job.params for job in [*cut, *rest]} == wanted
    assert "trial 2 was interrupted and resumes" in diary.notes()
    summary = second.close("completed")
    assert summary["counts"] == {"complete": 6}
    assert [trial.state.name for trial in stored(tmp_path)] == ["COMPLETE"] * 6
    third, _ = algorithm(tmp_path, sweep(6))
    assert third.done
    assert third.close("completed") == summary


def test_a_larger_total_goes_on(tmp_path: Path) -> None:
    for n, new in ((2, TRIAL[:2]), (4, TRIAL[2:])):
        made, _ = algorithm(tmp_path, sweep(n))
        assert [job.key for job in drive(made, Fake(loss))] == new
        made.close("completed")


def test_another_space_or_other_folds_are_refused(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(1))
    drive(made, Fake(loss))
    made.close("completed")
    with pytest.raises(SweepError, match=r"space.optim.lr: was .*1.0.* is .*0.5"):
        algorithm(tmp_path, {**sweep(1), "space": {**SPACE, "optim.lr": {**LR, "high": 0.5}}})
    with pytest.raises(SweepError, match=r"folds: was None, is '[0-9a-f]+'"):
        algorithm(tmp_path, sweep(1), folds=3)
    with pytest.raises(SweepError, match=r"seed: was 0, is 1"):
        algorithm(tmp_path, sweep(1, study={"seed": 1}))


def test_a_trial_has_an_identity_by_its_settings_its_code_and_its_folds(tmp_path: Path) -> None:
    base = load_config(env=None)
    source = sweep(2, first_trials=[{"optim.lr": 0.01}, {"optim.lr": 0.02}])

    def identities(name: str, *, code: str = "a", folds: int | None = None, **more: Any) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        header = RunStarted(function="m.train", code={"train": code})
        made, _ = algorithm(folder, {**source, **more}, folds=folds, header=header, config=base)
        drive(made, Fake(loss))
        return [trial.user_attrs["identity"] for trial in stored(folder)]

    first = identities("first")
    assert len(set(first)) == 2
    assert identities("again", placement="device_per_trial") == first
    assert not set(identities("code", code="b")) & set(first)
    assert not set(identities("folds", folds=2)) & set(first)
    base = base.with_overrides({"seed": 5})
    assert not set(identities("seed")) & set(first)
    base = base.with_overrides({"seed": load_config(env=None).seed, "tracking.mlflow": False})
    assert identities("tracking") == first


# --- folds ---


def by_fold(job: SearchJob, step: int) -> dict[str, float]:
    return {"val_loss": loss(job, 2)["val_loss"] + (job.fold or 0)}


def test_a_trial_with_folds_is_the_mean_of_its_jobs(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(2), folds=3)
    jobs = drive(made, Fake(by_fold), slots=2)
    assert [job.key for job in jobs] == [f"{key}/fold-{i}" for key in TRIAL[:2] for i in range(3)]
    assert [job.fold for job in jobs] == [0, 1, 2] * 2
    assert all(job.judged for job in jobs)  # a failed fold ends the others at a report
    base = loss(jobs[0], 2)["val_loss"]
    assert diary.ends()[0].value == pytest.approx(base + 1)
    assert diary.ends()[0].seconds == 3.0
    reports = [e.value - base for e in diary.of("intermediate") if e.number == 0]
    assert reports == pytest.approx([0, 0.5, 1])
    states = [e.state for e in diary.of("fold") if (e.number, e.fold) == (0, 2)]
    assert states == ["running", "complete"]
    made.close("completed")


def test_the_best_report_of_a_fold_may_be_its_value(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1, study={"trial_value": "best"}), folds=2)
    drive(made, Fake(lambda job, step: {"val_loss": [0.3, 0.1, 0.2][step] + (job.fold or 0)}))
    assert diary.ends()[0].value == pytest.approx((0.1 + 1.1) / 2)
    made.close("completed")


def test_running_means_wait_for_the_folds_before(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1), folds=3)
    jobs = [made.next(None) for _ in range(3)]
    for i, seen in ((1, []), (2, []), (0, [0, 1, 2])):
        made.on_end(jobs[i], JobResult(status="completed", metrics={"val_loss": float(i)}))
        assert [event.step for event in diary.of("intermediate")] == seen
    assert [event.value for event in diary.of("intermediate")] == [0.0, 0.5, 1.0]
    made.close("completed")


def test_a_trial_is_pruned_between_folds(tmp_path: Path) -> None:
    study = {"pruner": "median", "pruner_options": {"n_startup_trials": 1}}
    firsts = [{"optim.lr": 0.01}, {"optim.lr": 1.0}]
    made, diary = algorithm(tmp_path, sweep(2, study=study, first_trials=firsts), folds=4)
    jobs = drive(made, Fake(by_fold))
    assert [job.key for job in jobs[4:]] == ["trials/0001/fold-0"]
    state, reason = ends(diary)[1]
    assert state == "pruned"
    assert reason.startswith("after 1 folds, with val_loss 4")
    made.close("completed")


def test_wilcoxon_compares_fold_by_fold(tmp_path: Path) -> None:
    study = {"pruner": "wilcoxon"}
    firsts = [{"optim.lr": 0.01}, {"optim.lr": 1.0}]
    source = sweep(2, study=study, first_trials=firsts)
    made, diary = algorithm(tmp_path, {**source, "folds": {"k": 8}}, folds=8)
    jobs = drive(made, Fake(by_fold))
    assert ends(diary)[1][0] == "pruned"
    assert 8 + 2 < len(jobs) < 16
    values = [event.value for event in diary.of("intermediate")][:3]
    assert [value - values[0] for value in values] == pytest.approx([0, 1, 2])
    made.close("completed")


def test_a_failed_fold_fails_its_trial_and_lets_the_others_leave(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1), folds=4)
    one, two = made.next(None), made.next(None)
    made.on_end(one, JobResult(status="failed", fault="raised", error="ValueError: bad fold"))
    assert made.next(None) is None
    assert made.on_report(two, {"val_loss": 0.5}, 0) == "pruned"
    made.on_end(two, JobResult(status="pruned"))
    assert ends(diary) == {0: ("failed", "ValueError: bad fold")}
    assert made.done
    with pytest.raises(SweepError, match="ValueError: bad fold"):
        made.close("completed")


def test_finished_folds_of_a_dead_session_are_not_run_again(tmp_path: Path) -> None:
    first, _ = algorithm(tmp_path, sweep(2), folds=3)
    drive(first, Fake(by_fold), jobs=3)  # folds 0 and 1 have ended, fold 2 runs
    second, diary = algorithm(tmp_path, sweep(2), folds=3)
    jobs = drive(second, Fake(by_fold))
    assert [job.key for job in jobs] == [
        "trials/0000/fold-2",
        *(f"trials/0001/fold-{i}" for i in range(3)),
    ]
    base = loss(jobs[0], 2)["val_loss"]
    assert diary.ends()[0].value == pytest.approx(base + 1)
    second.close("completed")


def test_a_trial_whose_session_died_after_its_last_fold_gets_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, diary = algorithm(tmp_path, sweep(1), folds=2)
    write = diary.write

    def dies_at_the_last_fold(event: Event) -> None:
        if isinstance(event, FoldChanged) and (event.fold, event.state) == (1, "complete"):
            raise Killed
        write(event)

    monkeypatch.setattr(diary, "write", dies_at_the_last_fold)
    drive(first, Fake(by_fold))
    second, diary = algorithm(tmp_path, sweep(1), folds=2)
    assert drive(second, Fake(by_fold)) == []
    assert second.close("completed")["counts"] == {"complete": 1}
    assert ends(diary) == {0: ("complete", None)}


# --- time ---


def test_a_trial_that_starts_beside_another_has_all_slots_for_its_folds(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(2, budget={"reserve_for_refit": 0}), folds=2)
    one = made.next()
    made.next()
    made.on_end(one, JobResult(status="completed", metrics={"val_loss": 0.5}, seconds=10.0))
    # Both folds at once take 10 s, one after the other 20 s.
    job = made.next(15.0)
    assert job is not None
    assert job.key == "trials/0001/fold-0"


def test_trials_of_an_earlier_session_tell_how_long_a_fold_takes(tmp_path: Path) -> None:
    budget = {"reserve_for_refit": 0}
    first, _ = algorithm(tmp_path, sweep(1, budget=budget), folds=2)
    drive(first, Fake(by_fold, seconds=10.0))
    first.close("completed")
    second, _ = algorithm(tmp_path, sweep(2, budget=budget), folds=2)
    jobs = drive(second, Fake(by_fold, seconds=10.0), slots=2, left=15.0)
    assert [job.key for job in jobs] == ["trials/0001/fold-0", "trials/0001/fold-1"]
    second.close("completed")


def test_no_trial_starts_that_cannot_end_in_time(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(99))
    jobs = drive(made, Fake(loss, seconds=10.0), left=45.0)
    assert len(jobs) == 3  # 10 s for the winner's refit are kept back
    assert made.done
    assert "no more trials start: 15 s are left, 10 s of them reserved" in diary.notes()
    made.close("deadline")


def test_what_is_kept_back_may_be_said(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(99, budget={"reserve_for_refit": 0}))
    assert len(drive(made, Fake(loss, seconds=10.0), left=45.0)) == 4
    made.close("deadline")


def test_a_sweep_without_a_number_of_trials_is_through_when_its_time_is_up(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, {**sweep(1), "budget": {"timeout": 45}})
    drive(made, Fake(loss, seconds=10.0), left=45.0)
    assert made.done
    made.close("completed")


def test_a_sweep_whose_time_was_up_before_its_first_trial_was_cut_off(tmp_path: Path) -> None:
    source = {**sweep(1), "budget": {"timeout": 45}}
    made, _ = algorithm(tmp_path, source, deadline=time.time() - 1)
    assert drive(made, Fake(loss), left=-1.0) == []
    made.close("deadline")


def test_a_sweep_that_the_host_cuts_off_is_to_be_gone_on_with(tmp_path: Path) -> None:
    source = {**sweep(1), "budget": {"timeout": 9999}}
    made, _ = algorithm(tmp_path, source, imposed=True)
    drive(made, Fake(loss, seconds=10.0), left=45.0)
    assert made.done
    made.close("deadline")


def test_a_job_that_sees_the_deadline_before_the_loop_ends_the_sweep(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(2))
    made.on_end(made.next(), JobResult(status="deadline", metrics={"val_loss": 0.5}))
    assert made.next() is None
    assert made.done
    made.close("deadline")
    again, _ = algorithm(tmp_path, sweep(2))
    assert [job.key for job in drive(again, Fake(loss))] == TRIAL[:2]
    again.close("completed")


def test_the_number_of_epochs_scales_the_prediction(tmp_path: Path) -> None:
    space = {"optim.lr": LR, "train.epochs": {"type": "int", "low": 1, "high": 100}}
    firsts = [{"train.epochs": 10}, {"train.epochs": 100}]
    source = {**sweep(2, first_trials=firsts, budget={"reserve_for_refit": 0}), "space": space}
    made, diary = algorithm(tmp_path, source)
    jobs = drive(made, Fake(loss, seconds=5.0), left=50.0)
    assert [job.params["train.epochs"] for job in jobs] == [10]
    assert "a trial takes about 50 s" in diary.notes()
    made.close("deadline")
    assert ends(diary)[1][0] == "waiting"
    again, _ = algorithm(tmp_path, source)
    assert [job.params["train.epochs"] for job in drive(again, Fake(loss))] == [100]
    again.close("completed")


# --- commands from outside ---


def test_a_paused_sweep_starts_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(2))
    job = made.next(None)
    made.on_command(SearchCommand(op="pause"))
    made.on_end(job, JobResult(status="completed", metrics={"val_loss": 0.5}))
    assert made.next(None) is None
    assert not made.done
    made.on_command(SearchCommand(op="resume"))
    assert made.next(None) is not None


def test_a_stopped_sweep_leaves_its_trials_for_the_next_session(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(3))
    job = made.next(None)
    made.stop()
    assert made.pool.stopped == {TRIAL[0]: "a test asks"}
    assert made.next(None) is None
    made.on_end(job, JobResult(status="stopped", metrics={"val_loss": 0.9}, seconds=4.0))
    assert made.done
    made.close("stopped")
    assert ends(diary) == {0: ("waiting", "the sweep ended as stopped")}
    again, diary = algorithm(tmp_path, sweep(3))
    assert [one.key for one in drive(again, Fake(loss))] == TRIAL[:3]
    assert diary.ends()[0].seconds == 5.0
    again.close("completed")


def test_a_trial_stopped_by_hand_does_not_come_back(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(2))
    job = made.next(None)
    made.on_command(SearchCommand(op="stop_trial", n=0))
    made.on_end(job, JobResult(status="stopped"))
    assert ends(diary) == {0: ("pruned", "stopped by hand")}
    assert [one.key for one in drive(made, Fake(loss))] == [TRIAL[1]]
    made.close("completed")


def test_a_trial_stopped_by_hand_while_no_job_of_it_runs_ends_at_once(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, sweep(1), folds=2)
    job = made.next()
    made.on_command(SearchCommand(op="pause"))
    made.on_end(job, JobResult(status="completed", metrics={"val_loss": 0.5}))
    assert not made.done
    made.on_command(SearchCommand(op="stop_trial", n=0))
    assert ends(diary) == {0: ("pruned", "stopped by hand")}
    assert made.done


def test_added_trials_are_remembered(tmp_path: Path) -> None:
    made, _ = algorithm(tmp_path, sweep(1))
    made.on_command(SearchCommand(op="add_trials", n=2))
    assert len(drive(made, Fake(loss), jobs=2)) == 2
    again, _ = algorithm(tmp_path, sweep(1))
    assert [job.key for job in drive(again, Fake(loss))] == TRIAL[1:3]
    again.close("completed")


# --- the winner ---


def test_the_oldest_of_equal_trials_wins_in_this_session_and_the_next(tmp_path: Path) -> None:
    def values(job: SearchJob, step: int) -> dict[str, float]:
        return {"val_loss": {TRIAL[0]: 0.3, TRIAL[1]: 0.1, TRIAL[2]: 0.1}[job.key]}

    made, diary = algorithm(tmp_path, sweep(3))
    drive(made, Fake(values), slots=2)
    summary = made.close("completed")
    assert (summary["best"], summary["best_value"]) == (1, 0.1)
    assert diary.ends()[1].best
    again, _ = algorithm(tmp_path, sweep(3))
    assert again.done
    assert again.close("completed") == summary
