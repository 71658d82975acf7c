"""nb.benchmark: its rows, what it says where it cannot measure, and that nothing of it is left."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import command
from kernels import descendants, script, until

import nbtoolkit as nb
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.benchmark_sections import Measurement


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    """Whatever is written into the output folder is found there."""
    place = {"runtime.output_dir": str(tmp_path / "outputs"), "tracking.mlflow": False}
    return nb.load_config(env=None, overrides=place)


def returns_at_once(config: nb.Config, ctx: nb.RunContext) -> float:
    return 1.0


def fails(config: nb.Config, ctx: nb.RunContext) -> None:
    raise ZeroDivisionError("no luck today")


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("nbtoolkit-")}


@pytest.fixture(scope="module")
def result() -> nb.Benchmark:
    return nb.benchmark(sections=["communication", "memory"])


# --- what it shows ---


@pytest.mark.long
def test_an_all_reduce_takes_longer_the_larger_it_is(result: nb.Benchmark) -> None:
    assert result.status == "completed"
    gloo = [row for row in result.rows if row.name.startswith("gloo: ")]
    sizes = [row.at for row in gloo if row.at is not None]
    assert (sizes[0], sizes[-1]) == (2**10, 2**26)
    assert all(before < after for before, after in pairwise(sizes))
    values = [row.value for row in gloo if row.value is not None]
    assert len(values) == len(sizes)
    assert values[-1] > 10 * values[0] > 0


@pytest.mark.long
def test_the_memory_of_an_empty_function_and_of_the_users_is_measured(result: nb.Benchmark) -> None:
    empty, used = (row.value for row in result.rows if row.section == "memory")
    assert empty is not None
    assert used is not None
    assert 1 < empty < used


@pytest.mark.long
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with two GPUs there is a value")
def test_what_this_machine_lacks_is_a_row_with_the_reason(result: nb.Benchmark) -> None:
    (row,) = [row for row in result.rows if row.name == "nccl"]
    assert (row.value, row.note) == (None, "nccl needs two GPUs; this machine has 0")


@pytest.mark.long
def test_table_html_and_csv_hold_all_rows(result: nb.Benchmark, tmp_path: Path) -> None:
    lines = result.table().splitlines()
    assert f"torch {result.versions['torch']}" in lines[-1]
    assert lines[0].split() == ["section", "measured", "value", "unit", "relative", "note"]
    assert len(lines) == 2 + len(result.rows)
    assert result._repr_html_().count("<tr>") == 1 + len(result.rows)
    with result.to_csv(tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["name"] for row in read] == [row.name for row in result.rows]
    assert read[0]["machine"] == result.machine
    assert float(read[0]["value"]) == result.rows[0].value


@pytest.mark.long
def test_curves_are_drawn_for_scaling_and_communication(result: nb.Benchmark) -> None:
    rows = [Measurement("weak scaling: 1 rank", 100.0, "samples/s", at=1, section="scaling")]
    rows += [Measurement("weak scaling: 2 ranks", 190.0, "samples/s", at=2, section="scaling")]
    both = nb.Benchmark(**{**vars(result), "rows": (*result.rows, *rows)})
    html = both.plot().html
    assert html.count("<polyline") == 2
    assert "samples/s by ranks: weak scaling" in html
    assert "ms by bytes: gloo" in html
    assert "nothing to draw" in nb.Benchmark(**{**vars(result), "rows": ()}).plot().html


# --- what it refuses, and what it cannot measure ---


def test_an_unknown_section_or_time_is_refused_before_anything_starts() -> None:
    with pytest.raises(TuningError, match=r"no section 'speed'[^$]*scaling, comm[^$]*choose"):
        nb.benchmark(sections=["speed"])
    with pytest.raises(TuningError, match="minutes is 0"):
        nb.benchmark(minutes=0)
    wrong: Any = "train"
    with pytest.raises(nb.errors.LaunchError, match="'train'"):
        nb.benchmark(wrong)


def test_a_function_without_fit_is_a_row_with_the_reason(
    config: nb.Config, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = nb.benchmark(returns_at_once, config, sections=["scaling"])
    (row,) = result.rows
    assert row.value is None
    assert "did no optimizer step of nb.fit" in row.note
    assert re.fullmatch(r"benchmark: scaling .* s, 1 row after .* s\n", capsys.readouterr().out)
    assert not (tmp_path / "outputs").exists()


def test_an_error_of_the_function_is_raised_and_leaves_nothing(config: nb.Config) -> None:
    before = folders()
    with pytest.raises(ZeroDivisionError, match="no luck today"):
        nb.benchmark(fails, config, sections=["scaling"])
    assert folders() == before


def test_when_the_time_is_up_it_returns_what_it_has(config: nb.Config) -> None:
    before = folders()
    result = nb.benchmark(config=config, sections=["memory", "communication"], minutes=0.5 / 60)
    assert result.status == "time"
    assert [(row.value, row.note) for row in result.rows] == [
        (None, "no time left: minutes=0.00833333")
    ] * 2
    assert folders() == before


# --- interrupts ---


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "seconds"),
    [
        ("memory", 1.0),
        ("scaling", 3.0),
    ],
)
def test_an_interrupt_returns_what_there_is_and_leaves_nothing(
    section: str, seconds: float, tmp_path: Path
) -> None:
    """Ctrl-C while ranks of ours run, and while those of the user's function do."""
    code = f"""
        import nbtoolkit as nb
        result = nb.benchmark(sections=["communication", {section!r}])
        print(result.status, *{{row.section for row in result.rows}})
        print(nb.launch(lambda config, ctx: 7, {{"tracking.mlflow": False}}, display="off").value)
    """
    before = folders()
    with script(code, tmp_path) as running:
        assert running.process.stdout is not None
        shown = ""
        while not shown.endswith(" s,"):  # the first section is done
            shown += running.process.stdout.read(1)
        busy = descendants(running.pid)
        until(lambda: descendants(running.pid) - busy, f"a process of {section}")
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(seconds)
        running.interrupt()
        out = running.output().splitlines()
    assert re.search(r" interrupted after ", out[0])
    status, *sections = out[1].split()
    assert status == "interrupted"
    # A fast machine may have measured one row of memory before the interrupt.
    assert "communication" in sections
    assert set(sections) <= {"communication", section}
    assert out[2:] == ["7"]  # the next launch works
    assert folders() == before


# --- the command, and all of it ---


@pytest.mark.long
def test_the_command_prints_the_table_and_writes_the_rows(tmp_path: Path) -> None:
    done = command(tmp_path, "bench", "--sections", "communication", "--csv", "rows.csv")
    assert done.returncode == 0, done.stderr
    assert "gloo: 64 MB" in done.stdout
    assert "gloo: 64 MB" in (tmp_path / "rows.csv").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    wrong = command(tmp_path, "bench", "--sections", "speed")
    assert wrong.returncode == 2
    assert "there is no section 'speed'" in wrong.stderr


@pytest.mark.long
def test_the_scaling_of_a_function_is_measured(config: nb.Config, tmp_path: Path) -> None:
    result = nb.benchmark(config=config, sections=["scaling"])
    assert result.status == "completed"
    named = {row.name: row for row in result.rows}
    assert named["weak scaling: 1 rank"].relative == 1.0
    assert named["strong scaling: 1 rank"].relative == 1.0
    for kind in ("weak", "strong"):
        of_two = named[f"{kind} scaling: 2 ranks"]
        assert of_two.value is not None
        assert of_two.relative is not None
        assert of_two.relative > 0
    assert not (tmp_path / "outputs").exists()
