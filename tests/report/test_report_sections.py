"""Sections of a report from events written by hand: their content, and when they are left out."""

from __future__ import annotations

import re
from pathlib import Path

from run_folders import sweep, trained, trial, write_run

from nbtoolkit.cards import html
from nbtoolkit.views.chart import PALETTE
from nbtoolkit.views.report import PAGES, ReportSection, read_report


def words(section: ReportSection) -> str:
    return html(section.cards, images=False)


def cells(section: ReportSection) -> list[list[str]]:
    """The rows of a section's last table."""
    rows = words(section).split("<tbody>")[-1].partition("</tbody>")[0].split("<tr>")[1:]
    return [re.findall(r"<td[^>]*>([^<]*)", row) for row in rows]


def test_differences_have_what_decides_first_and_nothing_that_is_equal(tmp_path: Path) -> None:
    for number in range(2):
        settings = {"runtime": {"output_dir": f"out/{number}"}, "optim": {"lr": 0.1 * number}}
        write_run(
            tmp_path,
            str(number),
            events=trained({"loss": [1.0]}, {"seed": 0, "model": {}, **settings}),
        )
    write_run(tmp_path, "2", events=trained({"loss": [1.0]}, {"seed": 0, "model": {"deep": True}}))
    assert cells(read_report(tmp_path).comparison) == [
        ["optim.lr", "0", "0.1", ""],
        ["model.deep", "", "", "true"],
        ["runtime.output_dir", "out/0", "out/1", ""],
    ]


def test_the_newest_runs_are_compared_and_their_number_is_stated(tmp_path: Path) -> None:
    for number in range(10):
        write_run(tmp_path, f"2026010{number}T000000-run", events=trained({"loss": [0.1, 0.2]}))
    report = read_report(tmp_path)
    told = words(report.comparison)
    assert told.count("<polyline") == len(PALETTE)
    assert "the newest 7 of 10 runs" in told
    assert "The settings of all these runs are equal." in told
    assert len(report.pages) == PAGES


def test_training_and_validation_of_one_quantity_share_a_chart(tmp_path: Path) -> None:
    for name in "ab":
        metrics = {"train_loss": [1.0, 0.5], "val_loss": [1.0, 0.6], "val_accuracy": [0.1, 0.2]}
        write_run(tmp_path, name, events=trained(metrics))
    told = words(read_report(tmp_path).comparison)
    assert told.count("<svg") == 2
    assert told.count("stroke-dasharray") == 2
    assert "a, training" in told


def test_metrics_that_are_not_finite_are_drawn_without_these_values(tmp_path: Path) -> None:
    for name in "ab":
        losses = [1.0, float("nan"), float("inf"), 0.5]
        write_run(tmp_path, name, events=trained({"val_loss": losses}))
    told = words(read_report(tmp_path).comparison)
    assert "nan" not in told
    assert "inf" not in told


def test_damaged_events_and_a_missing_sweep_config_do_not_end_a_report(tmp_path: Path) -> None:
    kinds = ("trial", "intermediate", "fold", "command", "ended", "device", "metrics", "report")
    broken = [{"type": kind} for kind in (*kinds, "?")]
    whole = {"type": "fold", "number": None, "fold": 0, "state": "complete", "metrics": {"a": 1.5}}
    for kind in ("run", "sweep", "cv"):
        run = write_run(tmp_path, kind, events=[{"type": "run"}, *broken, whole], kind=kind)
        if kind == "sweep":
            (run.folder / "sweep.yaml").write_text("study: {")
    report = read_report(tmp_path)
    assert [section.title for section in report.sections] == ["Runs", "sweep", "run", "cv"]
    assert "1.5" in words(report.pages[2])
    assert "cannot be shown" not in "".join(map(words, report.pages))


def test_sections_without_contents_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, "a", events=[{"type": "run"}])
    assert [section.title for section in read_report(tmp_path).sections] == ["Runs", "a"]


def test_a_sweeps_best_value_is_in_the_table(tmp_path: Path) -> None:
    trials = [trial(0, value=0.5, best=True), trial(1, value=0.25)]
    sweep(tmp_path, [*trials, {"type": "ended", "status": "stopped"}])
    [row] = cells(read_report(tmp_path).overview)
    assert row[:4] == ["sweep-0001", "sweep", "stopped", "0.5000"]


def test_a_section_is_shown_by_a_cell_without_formulas(tmp_path: Path) -> None:
    section = read_report(tmp_path).overview
    assert "mathjax_ignore" in section._repr_html_()
    assert repr(section) == "ReportSection('Runs', 1 card)"
