"""Sections of a report from events written by hand: their content, and when they are empty."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from run_folders import trained, write_run

from nbtoolkit.report.report import read_report
from nbtoolkit.report.section import Picture, ReportSection
from nbtoolkit.study.plots import COLOURS


def words(section: ReportSection) -> str:
    return "".join(part for part in section.parts if isinstance(part, str))


def figures(section: ReportSection) -> list[Any]:
    return [part.figure for part in section.parts if isinstance(part, Picture)]


def cells(section: ReportSection) -> list[list[str]]:
    """The rows of a section's first table."""
    rows = words(section).split("<tbody>")[1].partition("</tbody>")[0].split("<tr>")[1:]
    return [re.findall(r"<td[^>]*>([^<]*)", row) for row in rows]


def test_device_use_is_the_mean_for_each_rank_and_gpu_and_memory_the_most(tmp_path: Path) -> None:
    readings = [
        [
            {"rank": 0, "cpu": share, "memory": 10**9},
            {"index": 0, "utilization": 100 * share, "memory_used": 4 * 10**9},
            {"index": 1, "utilization": 50, "memory_used": share * 10**10},
        ]
        for share in (0.5, 1.0)
    ]
    diary = [{"type": "device", "readings": one} for one in readings]
    write_run(tmp_path, "looked-at", events=diary)
    write_run(tmp_path, "trained", events=trained({"loss": [1.0] * 3}))
    assert cells(read_report(tmp_path).throughput) == [
        ["looked-at", "", "1", "0.75", "75, 50", "10"],
        ["trained", "200", "1.5", "", "", ""],
    ]


def test_a_column_that_no_run_has_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, "a", events=trained({"loss": [1.0] * 3}))
    assert "GPU" not in words(read_report(tmp_path).throughput)


def test_throughput_is_drawn_as_the_median_of_those_around(tmp_path: Path) -> None:
    write_run(tmp_path, "a", events=trained({"loss": [1.0] * 5}))
    [figure] = figures(read_report(tmp_path).throughput)
    [line] = figure.axes[0].lines
    assert list(line.get_ydata()) == [200.0, 250.0, 300.0, 350.0, 400.0]


def test_differences_have_what_decides_first_and_nothing_that_is_equal(tmp_path: Path) -> None:
    for number in range(2):
        settings = {"runtime": {"output_dir": f"out/{number}"}, "optim": {"lr": 0.1 * number}}
        write_run(
            tmp_path,
            str(number),
            events=trained({"loss": [1.0]}, {"seed": 0, "model": {}, **settings}),
        )
    write_run(tmp_path, "2", events=trained({"loss": [1.0]}, {"seed": 0, "model": {"deep": True}}))
    assert cells(read_report(tmp_path).differences) == [
        ["optim.lr", "0.0", "0.1", ""],
        ["model.deep", "", "", "true"],
        ["runtime.output_dir", "out/0", "out/1", ""],
    ]


def test_the_newest_runs_are_drawn_and_those_left_out_are_counted(tmp_path: Path) -> None:
    metrics = {f"metric_{number}": [0.1, 0.2] for number in range(8)}
    for number in range(10):
        write_run(tmp_path, f"2026010{number}T000000-run", events=trained(metrics))
    section = read_report(tmp_path).curves
    [figure] = figures(section)
    assert len(figure.axes) == 6
    assert len(figure.axes[0].lines) == len(COLOURS) == 8
    assert "The newest 8 of 10 runs are drawn." in words(section)
    assert "Not drawn: 2 metrics: metric_6, metric_7." in words(section)


def test_a_loss_over_decades_is_drawn_on_a_logarithmic_scale(tmp_path: Path) -> None:
    write_run(tmp_path, "a", events=trained({"val_loss": [10.0, 0.1], "val_error": [10.0, 0.1]}))
    loss, error = figures(read_report(tmp_path).curves)[0].axes
    assert (loss.get_yscale(), error.get_yscale()) == ("log", "linear")


def test_a_metric_that_is_no_number_now_and_then_is_drawn_without_these(tmp_path: Path) -> None:
    write_run(tmp_path, "a", events=trained({"val_loss": [1.0, float("nan"), float("inf"), 0.5]}))
    [figure] = figures(read_report(tmp_path).curves)
    assert figure.axes[0].get_ylim()[1] < 2
    assert figure.axes[0].get_yscale() == "linear"


def test_events_that_lack_what_they_should_have_are_passed_over(tmp_path: Path) -> None:
    kinds = (
        "trial",
        "intermediate",
        "fold",
        "command",
        "ended",
        "device",
        "metrics",
        "report",
        "?",
    )
    broken = [{"type": kind} for kind in kinds]
    whole = {"type": "fold", "number": None, "fold": 0, "state": "complete", "metrics": {"a": 1.5}}
    for kind in ("run", "sweep", "cv"):
        run = write_run(tmp_path, kind, events=[*broken, whole], about={"kind": kind})
        (run.folder / "sweep.yaml").write_text("study: {metric: a}\nspace: {seed: [1, 2]}\n")
    sections = read_report(tmp_path).sections
    assert len(sections) == 7
    assert "1 folds; a 1.5" in words(sections[3])


NOTHING = {
    "curves": "No run outside of a sweep has reported or logged a metric twice.",
    "sweeps": "There is no sweep in this folder.",
    "folds": "There is no cross-validation in this folder.",
    "confusion": "a: it returned nothing (it did not end well).",
    "throughput": "No run has logged anything",
    "differences": "There are no two configurations to compare.",
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_section_without_contents_says_so(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, "a", events=[{"type": "run"}])
    assert NOTHING[name] in words(getattr(read_report(tmp_path), name))
