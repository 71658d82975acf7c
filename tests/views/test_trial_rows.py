"""The rows of the trials' table: order, filter, pages, cells and their alignment."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_folders import NOON, folder, row_numbers, row_texts, started, sweep
from run_folders import hold_lock

from nbtoolkit.cards import ColouredCell
from nbtoolkit.run.events import IntermediateReported, TrialChanged
from nbtoolkit.search.study.table import SweepTable
from nbtoolkit.views.state import State, read_state
from nbtoolkit.views.trial_rows import (
    EVERYTHING,
    ROWS,
    View,
    columns,
    ordered,
    page_count,
    short_names,
    trial_page,
)


def numbers(state: State, chosen: View = EVERYTHING) -> list[int]:
    """The numbers of the rows that are shown."""
    return row_numbers(state, chosen, NOON)


def mixed(parent: Path, way: str = "maximize") -> State:
    """A sweep with trials in every state; number 3 is the best of its complete ones."""

    def trial(number: int, state: str, value: float | None = None, **more: object) -> TrialChanged:
        params = {"optim.lr": 0.1 / (number + 1), "model.name": "ab"[number % 2]}
        more = {"params": params, "seconds": 5.0 + number, **more}
        return TrialChanged(t=NOON + number, number=number, state=state, value=value, **more)  # type: ignore[arg-type]

    sign = 1 if way == "maximize" else -1
    events = [
        started({"train.epochs": 12}, search="sweep"),
        *(trial(n, "running", seconds=None) for n in range(7)),
        trial(0, "complete", sign * 0.5),
        trial(1, "failed", reason="ValueError: no"),
        IntermediateReported(t=NOON + 2, number=2, step=4, value=sign * 0.7),
        trial(2, "pruned", reason="at step 4"),
        trial(3, "complete", sign * 0.9, best=True),
        IntermediateReported(t=NOON + 3, number=4, step=7, value=sign * 0.6),
        IntermediateReported(t=NOON + 3, number=5, step=2, value=sign * 0.2),
        trial(5, "pruned", reason="stopped by hand"),
    ]
    paths = folder(parent, "sweep-0001", events)
    study = f"{{metric: score, direction: {way}, pruner: none}}"
    (paths.folder / "sweep.yaml").write_text(f"study: {study}\nspace: {{optim.lr: [1, 2]}}\n")
    with hold_lock(paths):
        return read_state(paths.folder)


# --- order ---


@pytest.mark.parametrize("way", ["maximize", "minimize"])
def test_the_best_come_first_then_running_pruned_and_failed(tmp_path: Path, way: str) -> None:
    state = mixed(tmp_path, way)
    assert numbers(state) == [3, 0, 4, 6, 5, 2, 1]
    assert row_texts(state)[0][0] == "★ 3"


def test_running_trials_are_on_the_first_page_where_they_can_be_stopped(tmp_path: Path) -> None:
    paths = sweep(tmp_path, ended=40, planned=60, status=None)
    with hold_lock(paths):
        state = read_state(paths.folder)
        first = row_texts(state)
    assert len(first) == ROWS
    assert [row[0] for row in first if "●" in row[1]] == ["40", "41"]
    assert numbers(state)[-2:] == [40, 41]
    complete = [float(row[2]) for row in first[:-2]]
    assert complete == sorted(complete)


def test_a_metric_sorts_the_best_first_and_a_parameter_the_largest(tmp_path: Path) -> None:
    state = mixed(tmp_path, "minimize")
    # Without a value: trials 1 and 6, last.
    assert numbers(state, View(sort="score")) == [3, 2, 4, 0, 5, 1, 6]
    assert numbers(state, View(sort="#delta")) == numbers(state, View(sort="score"))
    assert numbers(state, View(sort="optim.lr")) == [0, 1, 2, 3, 4, 5, 6]
    assert numbers(state, View(sort="#")) == [6, 5, 4, 3, 2, 1, 0]
    assert numbers(state, View(sort="#", reverse=True)) == [0, 1, 2, 3, 4, 5, 6]
    assert numbers(state, View(sort="#time"))[:3] == [5, 3, 2]
    assert numbers(state, View(sort="no such column")) == numbers(state)
    assert numbers(state, View(sort="model.name"))[:3] == [1, 3, 5]


def test_rows_are_filtered_by_state(tmp_path: Path) -> None:
    state = mixed(tmp_path)
    assert numbers(state, View(show="running")) == [4, 6]
    assert numbers(state, View(show="complete")) == [3, 0]
    assert numbers(state, View(show="pruned")) == [5, 2]
    assert numbers(state, View(show="failed")) == [1]
    assert trial_page(state, View(show="failed", sort="#")).text == "1 to 1 of 1 failed"
    assert trial_page(state).text == "1 to 7 of 7, best first"


def test_pages_begin_at_zero_and_one_beyond_the_last_is_the_last(tmp_path: Path) -> None:
    state = read_state(sweep(tmp_path, ended=25, planned=25).folder)
    assert isinstance(state.table, SweepTable)
    assert page_count(state.table, View()) == 3
    assert trial_page(state, View(page=2)).text == "21 to 25 of 25, best first"
    assert numbers(state, View(page=2)) == numbers(state, View(page=99))
    assert len(numbers(state, View(page=2))) == 5
    every = [number for page in range(3) for number in numbers(state, View(page=page))]
    assert sorted(every) == list(range(25))
    assert [trial.number for trial in ordered(state)] == every
    assert columns(None) == {}


# --- cells ---


def test_cells_hold_state_difference_and_parameters(tmp_path: Path) -> None:
    state = mixed(tmp_path, "minimize")
    assert [*columns(state)] == [
        "#", "#state", "score", "#delta", "#time", "optim.lr", "model.name",
    ]  # fmt: skip
    shown = {int(row[0].lstrip("★ ")): row for row in row_texts(state, now=NOON + 30)}
    assert shown[3] == ["★ 3", "complete", "-0.9000", "", "8.0 s", "0.025", "b"]
    assert shown[0][2:4] == ["-0.5000", "+0.4000"]
    assert shown[4][1] == "● 7/12"
    assert shown[4][4] == "26 s"  # it runs
    assert shown[6][1:4] == ["● running", "", ""]
    assert shown[2][1] == "pruned at 4"
    assert shown[5][1] == "stopped at 2"
    assert shown[1][1] == "✕ failed"


def test_a_difference_has_its_sign_whatever_is_better(tmp_path: Path) -> None:
    texts = {row[0]: row[3] for row in row_texts(mixed(tmp_path, "maximize"))}
    assert texts["0"] == "-0.4000"
    assert texts["★ 3"] == ""


def test_a_column_has_equal_decimals_and_a_bar_that_fills_for_the_best(tmp_path: Path) -> None:
    state = read_state(sweep(tmp_path).folder)
    assert {len(row[2].partition(".")[2]) for row in row_texts(state)} == {4}
    values = [row[2] for row in trial_page(state).table.rows]
    bars = [value.bar or 0.0 for value in values if isinstance(value, ColouredCell)]
    assert len(bars) == len(values)
    assert bars[0] == pytest.approx(1.0)
    assert bars == sorted(bars, reverse=True)


def test_a_row_has_all_parameters_for_a_pointer_and_cuts_what_is_long(tmp_path: Path) -> None:
    page = trial_page(read_state(sweep(tmp_path).folder))
    assert "optim.weight_decay = " in page.table.titles[0]
    long = TrialChanged(
        t=NOON, number=0, state="complete", value=1.0, params={"model.name": "x" * 500}
    )
    paths = folder(tmp_path, "long", [started(search="sweep"), long])
    assert len(row_texts(read_state(paths.folder))[0][-1]) == 24


def test_names_lose_their_section_where_that_is_unambiguous() -> None:
    assert short_names(["optim.lr", "model.hidden"]) == {
        "optim.lr": "lr",
        "model.hidden": "hidden",
    }
    assert short_names(["a.lr", "b.lr"]) == {"a.lr": "a.lr", "b.lr": "b.lr"}
