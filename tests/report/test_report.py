"""The report of real runs, a sweep and folds: as notebook sections, page and command."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from harmless import assert_harmless
from IPython.core.formatters import DisplayFormatter
from kernels import SECONDS

import nbtoolkit as nb
from nbtoolkit.cards import html
from nbtoolkit.errors import ReportFolderError
from nbtoolkit.tasks import digits
from nbtoolkit.views.report import ReportSection, RunsReport, label, page, read_report
from nbtoolkit.views.text import final_values


def fails(config, ctx):
    ctx.report({"val_accuracy": 0.1}, step=1)
    raise ValueError("<b>not</b> today")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one that failed, a sweep, a cross-validation: what a report is made of."""
    outputs = tmp_path_factory.mktemp("outputs")
    few = {"train.epochs": 3, "tracking.mlflow": False, "runtime.output_dir": str(outputs)}
    config = nb.load_config(env=None, overrides=few)
    nb.launch(digits.train, config, name="small", display="off")
    larger = config.with_overrides({"model.hidden": 300, "train.batch_size": 64})
    nb.launch(digits.train, larger, name="larger", processes=2, display="off")
    with pytest.raises(ValueError, match="not</b> today"):
        nb.launch(fails, config, name="fails", display="off")
    space = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-1, "log": True}}
    sweep_config = {"study": {"name": "rates", "metric": "val_accuracy"}, "space": space}
    nb.sweep(digits.train, config, sweep_config, n_trials=5, display="off")
    folds = nb.make_folds(digits.load()[1], k=3)
    nb.cross_validate(digits.train, config, folds, name="three", display="off")
    return outputs


@pytest.fixture
def report(folder: Path) -> RunsReport:
    return read_report(folder)


def words(section: ReportSection) -> str:
    return html(section.cards, images=False)


def test_the_table_has_every_run_with_its_status_and_scores(report: RunsReport) -> None:
    kinds = [(run.kind, run.status) for run in report.runs]
    completed = ("run", "completed")
    assert kinds == [
        completed,
        completed,
        ("run", "failed"),
        ("sweep", "completed"),
        ("cv", "completed"),
    ]
    told = words(report.overview)
    small, larger, _, sweep, cv = report.runs
    for run in (small, larger, sweep, cv):
        assert f">{final_values(run)['val_accuracy']:.4f}</td>" in told
    assert "CPU, 2 processes, fp32" in told
    assert "ValueError: &lt;b&gt;not&lt;/b&gt; today" in told


def test_each_run_has_its_page_the_newest_first(report: RunsReport) -> None:
    assert [page.title for page in report.pages] == [label(run) for run in report.runs[::-1]]
    cv, sweep, fails, larger, _ = map(words, report.pages)
    assert "fold 2" in cv
    assert "5/5" in sweep
    assert "best so far" in sweep
    assert "not&lt;/b&gt; today" in fails
    assert "val_accuracy" in larger


def test_the_comparison_has_both_runs_curves_and_the_settings_that_differ(
    report: RunsReport,
) -> None:
    from nbtoolkit.views.chart import PALETTE

    told = words(report.comparison)
    small, larger = report.runs[:2]
    assert f"{label(small)}, training" in told
    assert f'stroke="{PALETTE[0]}"' in told
    assert f'stroke="{PALETTE[1]}"' in told
    assert label(larger) in told
    assert ">train.batch_size</td>" in told
    assert ">train.epochs</td>" not in told
    assert told.index("train.batch_size") < told.index("distributed.world_size")


class Elements(HTMLParser):
    """The elements of a page and the addresses it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.addresses += [value or "" for name, value in attrs if name.endswith(("href", "src"))]


def test_the_page_has_it_all_in_one_file_and_needs_no_network(folder: Path, tmp_path: Path) -> None:
    written = nb.report(folder, tmp_path / "page.html")
    text = written.read_text()
    found = Elements(text)
    assert not found.names & {"script", "img", "link", "iframe"}
    outside = [one for one in found.addresses if not one.startswith(("#", "data:"))]
    assert outside == []
    assert "<svg role=" in text
    assert text.count("<h2 ") == 7
    assert "prefers-color-scheme: dark" in text
    assert str(folder) in text


@pytest.mark.long
def test_the_command_writes_the_page_into_the_folder_and_prints_its_path(folder: Path) -> None:
    program = [sys.executable, "-m", "nbtoolkit", "report", str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").stat().st_size > 10_000
    assert done.stderr == ""


def test_the_command_refuses_a_missing_folder_with_exit_code_2(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "nbtoolkit", "report", "missing"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert f"there is no folder {tmp_path / 'missing'} to report on" in done.stderr


def test_a_missing_folder_and_a_page_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportFolderError, match=r"there is no folder .*missing to report on"):
        nb.report(tmp_path / "missing")
    with pytest.raises(ReportFolderError, match="cannot be written: Is a directory"):
        nb.report(tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cell_whose_last_value_is_the_report_shows_it(folder: Path, tmp_path: Path) -> None:
    written = nb.report(folder, tmp_path / "page.html")
    shown, _ = DisplayFormatter().format(written)
    assert_harmless(shown["text/html"])
    titles = re.findall("<h2 [^>]*>([^<]*)</h2>", written.read_text())
    assert re.findall("<h3>([^<]*)</h3>", shown["text/html"]) == titles
    assert shown["text/html"].count("<img ") == written.read_text().count("<svg role=")
    assert "<svg" not in shown["text/html"]
    assert str(written) in shown["text/plain"]
    shown, _ = DisplayFormatter().format(written.parent)
    assert "text/html" not in shown


def test_a_folder_without_runs_makes_a_page_that_says_so(tmp_path: Path) -> None:
    assert "There are no runs in this folder." in nb.report(tmp_path).read_text()
    assert "<h2" not in page("t", "s", [])
