"""The page of a sweep, a run and a cross-validation: what it shows, and of what kind of folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harmless import EVIL, assert_harmless
from page_folders import (
    NOON,
    cross_validation,
    folder,
    regions,
    row_texts,
    run,
    started,
    sweep,
    write_log,
)
from run_folders import hold_lock

from nbtoolkit.run.events import (
    CommandReceived,
    FoldChanged,
    IntermediateReported,
    MetricsReported,
    NoteAdded,
    RunEnded,
    RunStarted,
    TrialChanged,
)
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.views.page import View, cards_of, page_html
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.sweep_cards import value_axis
from nbtoolkit.views.workers import DeviceUse


def texts(page: str) -> str:
    """What a person reads without a click: neither tags nor what only a pointer shows."""
    page = re.sub(r"<title>.*?</title>", "", page)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def trial(number: int, state: str = "complete", value: float | None = None, **more: object):  # type: ignore[no-untyped-def]
    more = {"t": NOON + 10 + number, "seconds": 5.0, "params": {"optim.lr": 0.1}, **more}
    return TrialChanged(number=number, state=state, value=value, **more)  # type: ignore[arg-type]


def small_sweep(parent: Path, *events: object, metrics: str = "score", way: str = "maximize"):  # type: ignore[no-untyped-def]
    """A sweep of a few hand-written trials."""
    paths = folder(parent, "sweep-0001", [started(search="sweep"), *events])  # type: ignore[list-item]
    (paths.folder / "sweep.yaml").write_text(
        f"study: {{metric: {metrics}, direction: {way}, pruner: none}}\nbudget: {{n_trials: 10}}\n"
        "space: {optim.lr: {type: float, low: 0.001, high: 1.0, log: true}}\n"
    )
    return paths


# --- regions ---


def test_a_sweep_has_its_regions_in_order_and_no_control(tmp_path: Path) -> None:
    paths = sweep(tmp_path)
    write_log(RunPaths(paths.folder / "trials/0019"), "epoch 12\n")
    state = read_state(paths.folder)
    assert list(regions(state)) == [
        "strip", "best", "history", "curves", "slices", "importance", "trials", "workers", "log",
        "files",
    ]  # fmt: skip
    page = page_html(state, now=NOON + 600)
    assert_harmless(page)
    assert not re.search(r"<(button|input|select|textarea|a)\b", page)
    assert "mathjax_ignore" in page
    assert len(page) < 60_000


def test_the_strip_says_everything_in_a_line(tmp_path: Path) -> None:
    paths = sweep(tmp_path, ended=12, status=None)
    with hold_lock(paths):
        text = texts(regions(read_state(paths.folder), now=NOON + 150)["strip"])
    for part in ("friedman-843e", "● running", "12/20", "2 running", "0 failed", "left", "best 0."):
        assert part in text
    assert text.index("12/20") < text.index("best 0.")


def test_a_run_has_metrics_curves_and_devices(tmp_path: Path) -> None:
    paths = run(tmp_path)
    with hold_lock(paths):
        state = read_state(paths.folder)
        parts = regions(state, now=NOON + 23)
    assert list(parts) == ["strip", "metrics", "curves", "workers", "files"]
    text = texts(parts["metrics"])
    for part in ("Best val_rmse", "0.4280", "at epoch 7", "samples/s", "5107", "steps/s", "left"):
        assert part in text
    assert parts["curves"].count("<svg") == 2  # training and validation of one quantity share one
    assert parts["curves"].count("stroke-dasharray") == 1
    assert "GPU 0" in texts(parts["workers"])
    assert "11.2 GB" in texts(parts["workers"])
    assert "model.hidden 64, optim.lr 0.02, train.epochs 12" in texts(parts["files"])


def test_a_cross_validation_has_folds_as_columns_and_a_line_for_each(tmp_path: Path) -> None:
    paths = cross_validation(tmp_path)
    with hold_lock(paths):
        parts = regions(read_state(paths.folder), now=NOON + 43)
    text = texts(parts["folds"])
    for part in ("fold 0", "fold 4", "waiting", "mean ± sd", "0.3700 ± 0.0100", "mean of 3 folds"):
        assert part in text
    assert parts["curves"].count("<polyline") == 4
    assert "slot 0 fold 3" in texts(parts["workers"])


def test_the_folds_of_the_best_trial_are_shown(tmp_path: Path) -> None:
    folds = [
        FoldChanged(t=NOON + n, number=0, fold=n, state="complete", metrics={"f1": 0.5 + n / 10})
        for n in range(3)
    ]
    events = [trial(0, "running"), *folds, trial(0, value=0.6, best=True)]
    text = texts(regions(read_state(small_sweep(tmp_path, *events).folder))["folds"])
    assert "Folds of trial 0" in text
    assert "0.6000 ± 0.1000" in text


def test_without_a_run_the_page_says_so() -> None:
    assert "No run yet" in page_html(None)


# --- charts ---


def test_a_value_beyond_the_worst_complete_one_is_a_cross_on_the_edge(tmp_path: Path) -> None:
    reports = [IntermediateReported(t=NOON + 1, number=2, step=1, value=-50.0)]
    events = [trial(0, value=0.5), trial(1, value=0.9, best=True), trial(2, "running"), *reports]
    state = read_state(small_sweep(tmp_path, *events, trial(2, "pruned")).folder)
    assert isinstance(state.table, SweepTable)
    axis = value_axis(state, state.table)
    assert axis.low == pytest.approx(0.5 - 0.15 * 0.4)
    assert axis.high == pytest.approx(0.9 + 0.05 * 0.4)
    page = regions(state)["history"]
    assert page.count("<path") == 1
    assert page.count("<circle") == 2
    assert "-50" in page  # its title
    assert "-40" not in texts(page)  # not its axis


def test_one_trial_that_diverged_does_not_flatten_the_others(tmp_path: Path) -> None:
    events = [trial(n, value=n / 10) for n in range(9)]
    diverged = trial(9, value=1e9)
    state = read_state(small_sweep(tmp_path, *events, diverged, way="minimize").folder)
    assert isinstance(state.table, SweepTable)
    high = value_axis(state, state.table).high
    assert high is not None
    assert high < 5


def test_every_trial_has_its_curve_and_above_200_the_page_says_which(tmp_path: Path) -> None:
    few = regions(read_state(sweep(tmp_path / "few", ended=30, planned=30).folder))["curves"]
    assert "all 30 trials" in texts(few)
    many = regions(read_state(sweep(tmp_path / "many", ended=260, planned=260).folder))["curves"]
    assert "the best 50, the running and the newest 50 of 260 trials" in texts(many)
    assert many.count("<polyline") <= 100


def test_slices_have_the_limits_of_the_space_in_its_order(tmp_path: Path) -> None:
    page = regions(read_state(sweep(tmp_path, ended=40, planned=40).folder))["slices"]
    names = ["lr", "weight_decay", "hidden", "dropout"]
    assert re.findall(r'font-weight:600;[^>]*">([a-z_]+)<', page) == names
    for limit in ("0.0001", "128", "1e-05"):
        assert limit in texts(page)


def test_importance_is_told_of_a_sweep_that_has_ended(tmp_path: Path) -> None:
    told = regions(read_state(sweep(tmp_path / "a", ended=40, planned=40).folder))["importance"]
    assert len(re.findall(r">0\.\d\d<", told)) == 4
    assert "complete trials" in texts(told)
    paths = sweep(tmp_path / "live", ended=30, status=None, planned=60)
    with hold_lock(paths):
        assert "importance" not in cards_of(read_state(paths.folder))
    few = regions(small_sweep_of(tmp_path / "few", 6))["importance"]
    assert "Cannot tell yet: 6 of 10 complete trials." in texts(few)
    assert "importance" not in cards_of(small_sweep_of(tmp_path / "equal", 12, value=0.5))


def small_sweep_of(parent: Path, count: int, value: float | None = None) -> State:
    """A sweep whose trials have different values, or one value."""
    events = [trial(n, value=n / 10 if value is None else value) for n in range(count)]
    return read_state(small_sweep(parent, *events).folder)


def test_workers_show_what_each_slot_did_and_does(tmp_path: Path) -> None:
    paths = sweep(tmp_path, ended=12, status=None)
    with hold_lock(paths):
        page = regions(read_state(paths.folder), now=NOON + 150)["workers"]
    text = texts(page)
    assert "slot 0 trial 12, step" in text
    assert "/12, 0." in text
    assert "slot 1 trial 13" in text
    assert "trials/min" in text
    assert "pruning saved" in text


# --- folders of any kind ---


def test_a_sweep_of_one_trial_and_one_without_a_value(tmp_path: Path) -> None:
    one = page_html(read_state(small_sweep(tmp_path / "a", trial(0, value=0.5, best=True)).folder))
    assert "0.5000" in texts(one)
    paths = small_sweep(tmp_path / "b", trial(0, "running", seconds=None))
    with hold_lock(paths):
        none = texts(page_html(read_state(paths.folder)))
    assert "No trial is complete yet" in none
    assert "No trial has started" in texts(
        page_html(read_state(small_sweep(tmp_path / "c").folder))
    )


def test_several_objectives_show_the_front(tmp_path: Path) -> None:
    values = [(0.9, 5.0), (0.8, 2.0), (0.7, 9.0)]
    events = [trial(n, values=list(pair)) for n, pair in enumerate(values)]
    paths = small_sweep(tmp_path, *events, metrics="[f1, ms]", way="[maximize, minimize]")
    state = read_state(paths.folder)
    parts = regions(state)
    assert list(parts)[:5] == ["strip", "front", "history", "slices", "trials"]
    assert "★ 2 trials that no other beats; maximize f1, minimize ms" in texts(parts["front"])
    assert parts["front"].count("<svg") == 1  # ms by f1
    assert parts["front"].count('r="5"') == 2  # the front
    assert "ms by f1" in parts["front"]
    for name in ("history", "slices"):
        assert parts[name].count("<svg") == 2  # one per objective
        assert texts(parts[name]).index("f1") < texts(parts[name]).index("ms")
    assert "0.9" in texts(parts["history"])
    rows = row_texts(state)
    assert [row[0] for row in rows] == ["★ 0", "★ 1", "2"]  # the front first
    assert rows[0][2:4] == ["0.9000", "5.000"]


def test_failed_trials_are_said_below_the_strip(tmp_path: Path) -> None:
    paths = small_sweep(tmp_path, trial(0, value=0.5), trial(1, "failed", reason="ValueError: no"))
    text = texts(regions(read_state(paths.folder))["strip"])
    assert "⚠ 1 trial failed, the last one is trial 1: ValueError: no" in text


def test_a_failed_run_shows_the_end_of_its_traceback(tmp_path: Path) -> None:
    trace = "Traceback:\n  line 7 of train.py\nValueError: <no>"
    paths = run(tmp_path, status="failed", error="ValueError: <no>", traceback=trace)
    page = page_html(read_state(paths.folder))
    assert "ValueError: &lt;no&gt;" in page
    assert "line 7 of train.py" in texts(page)


def test_an_error_in_one_region_leaves_the_others(tmp_path: Path) -> None:
    class Broken(State):
        def devices(self) -> list[DeviceUse]:
            raise ValueError(EVIL)

    state = Broken(sweep(tmp_path))
    state.refresh()
    parts = regions(state)
    assert "cannot be shown: ValueError" in parts["workers"]
    assert "0." in texts(parts["best"])
    assert_harmless(page_html(state))


def test_a_folder_that_is_deleted_or_unreadable_keeps_its_page(tmp_path: Path) -> None:
    paths = sweep(tmp_path)
    state = read_state(paths.folder)
    shutil.rmtree(paths.folder)
    state.refresh()
    text = texts(page_html(state))
    assert "Its folder was deleted" in text
    assert "friedman-843e" in text
    assert "cannot be shown" not in text


def test_a_run_of_an_older_version_is_shown_as_far_as_it_is_known(tmp_path: Path) -> None:
    old = RunStarted(t=NOON, config={"train": {"epochs": 3}, "gone": {"x": 1}, "optim": 7})
    report = MetricsReported(t=NOON + 1, values={"loss": 1.0, "acc": float("nan")}, step=1)
    text = texts(page_html(read_state(folder(tmp_path, "old", [old, report]).folder)))
    assert "1.000" in text
    assert "cannot be shown" not in text
    empty = texts(page_html(read_state(folder(tmp_path, "empty", []).folder)))
    assert "Nothing was reported" in empty
    assert "cannot be shown" not in empty


def test_names_and_texts_are_shown_and_never_executed(tmp_path: Path) -> None:
    wild = {"params": {EVIL: EVIL, "b": [1, {"c": 2}]}, "reason": EVIL}
    reports = [IntermediateReported(t=NOON + 5, number=0, step=n, value=0.5 + n) for n in (1, 2)]
    events = [NoteAdded(t=NOON, text=EVIL), trial(0, "running", **wild), *reports]
    events += [trial(0, value=0.5, best=True, **wild), trial(1, "failed", **wild)]
    paths = small_sweep(tmp_path, *events)
    write_log(RunPaths(paths.folder / "trials/0000"), EVIL)
    page = page_html(read_state(paths.folder), View(log=EVIL))
    assert_harmless(page)
    assert "cannot be shown" not in page
    named = MetricsReported(t=NOON + 1, values={EVIL: 1.0}, step=1)
    error = RunEnded(t=NOON + 2, status="failed", seconds=2.0, error=EVIL)
    paths = folder(tmp_path, "日本 $a$", [started(), named, error])
    page = page_html(read_state(paths.folder))
    assert_harmless(page)
    assert "日本 $a$" in page


def test_two_readers_show_the_same_and_paused_says_what_is_left(tmp_path: Path) -> None:
    pause = CommandReceived(t=NOON + 149, op="pause")
    paths = sweep(tmp_path, ended=12, status=None, more=[pause])
    with hold_lock(paths):
        early, late = read_state(paths.folder), read_state(paths.folder)
        early.refresh()
        assert page_html(early, now=NOON + 150) == page_html(late, now=NOON + 150)
        text = texts(regions(early, now=NOON + 150)["strip"])
    assert "paused" in text
    assert "Pausing: 2 trials still finishing, then paused, 6 left." in text
    assert "about" not in text


@pytest.mark.long
def test_the_page_of_ten_thousand_trials_stays_small(tmp_path: Path) -> None:
    paths = sweep(tmp_path, ended=10_000, planned=10_000, epochs=3)
    with hold_lock(paths):
        page = "".join(regions(read_state(paths.folder)).values())
    assert len(page) < 300_000


@pytest.mark.parametrize("write", [sweep, run, cross_validation])
def test_the_page_of_what_has_ended_stays_true_in_a_saved_notebook(
    write: Callable[[Path], RunPaths], tmp_path: Path
) -> None:
    state = read_state(write(tmp_path).folder)
    assert state.over
    assert page_html(state, now=NOON + 900) == page_html(state, now=NOON + 90_000)
