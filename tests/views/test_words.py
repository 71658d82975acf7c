"""A run in words: the line below a cell, the page in a terminal, and the ends of logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from harmless import EVIL, assert_harmless
from page_folders import (
    NOON,
    cross_validation,
    folder,
    regions,
    run,
    started,
    sweep,
    write_log,
)
from run_folders import hold_lock

from nbtoolkit.run.events import MetricsReported, RunEnded, TrialChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.views.page import page_text
from nbtoolkit.views.run_cards import log_names, log_text
from nbtoolkit.views.state import read_state
from nbtoolkit.views.text import best, curves_of, main_metric, summary_line


def test_a_line_says_what_the_strip_says(tmp_path: Path) -> None:
    paths = sweep(tmp_path / "a", ended=12, status=None)
    with hold_lock(paths):
        line = summary_line(read_state(paths.folder), NOON + 150)
    assert line.startswith("friedman-843e: running, 12/20 trials, ")
    for part in ("2 running", "0 failed", "left", "best val_rmse 0.3798 (trial 8)"):
        assert part in line
    done = summary_line(read_state(run(tmp_path / "b", reported=12, status="completed").folder))
    assert "train-1a2b: completed, epoch 12/12, 38 s, best val_rmse 0.3" in done
    folds = summary_line(read_state(cross_validation(tmp_path / "c").folder))
    assert "interrupted, 3/5 folds" in folds
    assert "val_rmse 0.3700 ± 0.0100 (mean of 3 folds)" in folds


def test_a_line_is_short_and_has_no_control_characters(tmp_path: Path) -> None:
    names = {f"metric\n{n}" * 20: 1.0 for n in range(9)}
    report = MetricsReported(t=NOON + 1, values=names, step=1)
    error = RunEnded(t=NOON + 2, status="failed", error="bad\x1b[31m" * 100, seconds=2.0)
    paths = folder(tmp_path, "x" * 200, [started(), report, error])
    line = summary_line(read_state(paths.folder))
    assert len(line) <= 400
    assert line.isprintable()


def test_the_text_of_a_page_has_settings_and_a_table(tmp_path: Path) -> None:
    paths = sweep(tmp_path / "a")
    text = page_text(read_state(paths.folder), now=NOON + 900)
    for part in ("friedman-843e  ✓ completed", "Best val_rmse", str(paths.folder), "Δ best"):
        assert part in text
    assert text.count("complete  0.") == 10  # rows of the first page
    cut = page_text(read_state(sweep(tmp_path / "b", ended=8, status=None).folder))
    assert "Interrupted: its process died. 8 of 20 trials" in cut
    folds = page_text(read_state(cross_validation(tmp_path / "c").folder))
    assert "mean of 3 folds" in folds
    assert page_text(None).startswith("No run yet")


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({}, ("best val_loss", "0.2500", "at step 2")),
        ({"checkpoint.monitor": "val_f1"}, ("best val_f1", "0.9000", "at step 1")),
        (
            {"checkpoint.monitor": "val_f1", "checkpoint.mode": "min"},
            ("best val_f1", "0.2000", "at step 3"),
        ),
        ({"checkpoint.monitor": "train_thing"}, ("train_thing", "7.000", "")),
    ],
)
def test_the_best_value_is_that_of_the_metric_that_is_monitored(
    checkpoint: dict[str, object], expected: tuple[str, str, str], tmp_path: Path
) -> None:
    values = [(0.5, 0.9), (0.25, 0.4), (0.75, 0.2)]
    reports = [
        MetricsReported(
            t=NOON + n,
            values={"train_thing": 5.0 + n, "val_loss": loss, "val_f1": f1},
            step=n + 1,
        )
        for n, (loss, f1) in enumerate(values)
    ]
    config = {"train.epochs": 1, **checkpoint}
    state = read_state(folder(tmp_path, "one", [started(config), *reports]).folder)
    assert best(state) == expected
    assert main_metric(state) in expected[0]


def test_what_fit_returns_beside_the_metrics_is_no_metric(tmp_path: Path) -> None:
    reported = {"val_loss": 0.5, "best_of_5": 0.9}
    returned = {**reported, "best_val_loss": 0.5, "epoch": 2.0, "best_epoch": 1.0}
    events = [
        MetricsReported(t=NOON + 1, values=reported, step=1),
        MetricsReported(t=NOON + 2, values=returned),
    ]
    state = read_state(folder(tmp_path, "one", [started(), *events]).folder)
    assert list(curves_of(state)) == ["val_loss", "best_of_5"]


# --- logs ---


def test_a_log_is_its_last_lines_with_bars_in_their_last_state(tmp_path: Path) -> None:
    paths = run(tmp_path)
    lines = [f"line {n}" for n in range(100)]
    for rank in (0, 1, 10):
        write_log(paths, "\n".join([*lines, " 1%\r 50%\r99%", "\x1b[31mred\x1b[0m", ""]), rank)
    names = log_names(read_state(paths.folder))
    assert list(names) == ["rank 0", "rank 1", "rank 10"]
    assert log_text(names["rank 1"], 3) == "line 99\n99%\nred"
    assert log_text(tmp_path / "none") == ""
    write_log(paths, "")
    assert "Nothing was written" in regions(read_state(paths.folder))["log"]
    assert log_names(None) == {}


def test_the_log_of_the_newest_running_trial_is_the_first(tmp_path: Path) -> None:
    paths = sweep(tmp_path, ended=12, status=None)
    for number in (3, 11, 12, 13):
        write_log(RunPaths(paths.folder / f"trials/{number:04d}"), f"trial {number}\n")
    with hold_lock(paths):
        names = log_names(read_state(paths.folder))
    assert list(names)[:2] == ["trial 13, rank 0", "trial 12, rank 0"]
    folds = cross_validation(tmp_path / "cv")
    for fold in (0, 3):
        write_log(RunPaths(folds.folder / "folds" / str(fold)), "x")
    assert list(log_names(read_state(folds.folder))) == ["fold 3, rank 0", "fold 0, rank 0"]


def test_a_log_and_names_are_shown_as_text(tmp_path: Path) -> None:
    paths = run(tmp_path)
    write_log(paths, EVIL)
    assert_harmless(regions(read_state(paths.folder))["log"])
    wild = TrialChanged(t=NOON, number=0, state="complete", value=1.0, params={"a\nb": "\x1b[0m"})
    paths = folder(tmp_path, "s", [started(search="sweep"), wild])
    assert "\x1b" not in page_text(read_state(paths.folder))
