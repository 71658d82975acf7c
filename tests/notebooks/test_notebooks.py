"""The notebooks run unchanged under papermill; test_nbval.py runs them in a plain kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
from demo import IPC
from kernels import SECONDS
from PIL import Image
from records import ended_runs, last_of
from run_folders import trained, write_run
from sklearn.datasets import load_digits

import nbtoolkit as nb

pytestmark = pytest.mark.timeout(900)  # whole notebooks

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
TRAIN, SWEEP, FOLDS, REPORT, METRIC, COMPETITION = (
    next(path for path in NOTEBOOKS if path.name == f"{name}.ipynb")
    for name in (
        "01_train",
        "02_sweep",
        "03_cross_validate",
        "05_report",
        "07_metric_learning",
        "08_competition",
    )
)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.nbformat_minor >= 5  # cells have ids
    tags = [tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])]
    assert tags.count("parameters") == 1
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.long
def test_training_under_papermill_with_parameters(tmp_path: Path) -> None:
    overrides = {"train.epochs": 3, "model.hidden": 32}
    parameters = {"processes": 2, "overrides": overrides, "output_dir": str(tmp_path / "out")}
    executed = papermill.execute_notebook(
        TRAIN,
        tmp_path / "executed.ipynb",
        parameters=parameters,
        cwd=tmp_path,
        progress_bar=False,
        start_timeout=SECONDS,
        config=IPC,
    )
    (run,) = (tmp_path / "out").glob("*-digits-*")
    result = last_of(run)
    assert (result.status, result.processes) == ("completed", 2)
    assert result.metrics["val_accuracy"] > 0.6
    assert (tmp_path / "out/mlflow.db").stat().st_size > 0

    outputs = {cell.id: cell.outputs for cell in executed.cells if cell.cell_type == "code"}
    assert "2 processes on the CPU" in outputs["plan"][-1].data["text/html"]
    assert f"{result.metrics['val_accuracy']:.6g}" in outputs["train"][-1].data["text/html"]
    assert "<img alt=" in html_of(outputs["curves"])
    shown = "".join(out.get("text", "") for out in outputs["train"])
    assert "[rank 0] epoch 3/3  train_loss" in shown
    assert str(run) in said(outputs["after"])
    assert complaints(outputs) == []


def said(cell: list[Any]) -> str:
    """What a cell printed; a busy kernel sends it in several outputs."""
    return "".join(out.get("text", "") for out in cell)


def complaints(outputs: dict[str, list[Any]]) -> list[str]:
    """What cells wrote to stderr; that a start takes 10 s and more is the machine's."""
    texts = [out.text for cell in outputs.values() for out in cell if out.get("name") == "stderr"]
    return [text for text in texts if not text.startswith("waiting for the fork server")]


def executed(path: Path, folder: Path, /, **parameters: Any) -> dict[str, list[Any]]:
    """The outputs of a notebook's cells, by the cells' ids."""
    notebook = papermill.execute_notebook(
        path,
        folder / "executed.ipynb",
        parameters={"output_dir": str(folder / "out"), **parameters},
        cwd=folder,
        progress_bar=False,
        start_timeout=SECONDS,
        config=IPC,
    )
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def html_of(outputs: list[Any]) -> str:
    return "".join(output.data.get("text/html", "") for output in outputs if "data" in output)


@pytest.mark.long
def test_the_sweep_shows_its_table_and_plots_and_trains_its_winner(tmp_path: Path) -> None:
    outputs = executed(SWEEP, tmp_path, n_trials=5, overrides={"train.epochs": 2})
    assert "5/5" in html_of(outputs["search"])
    for plot in ("history", "slices"):
        assert "<img alt=" in html_of(outputs[plot])
    assert outputs["importances"] == []  # of five trials
    [sweep] = (tmp_path / "out").glob("*-digits-*")
    [winner] = (tmp_path / "out").glob("*-winner-*")
    best = last_of(sweep).summary
    metrics = last_of(winner).metrics
    assert metrics["val_accuracy"] == pytest.approx(best["best_value"])
    assert (sweep / "best.yaml").exists()
    assert str(sweep) in said(outputs["after"])


@pytest.mark.long
def test_the_cross_validation_predicts_every_sample_and_trains_its_winner(tmp_path: Path) -> None:
    outputs = executed(FOLDS, tmp_path, k=3, n_trials=2, overrides={"train.epochs": 3})
    assert "3/3" in html_of(outputs["validate"])
    assert "of 1500 are right" in said(outputs["oof"])
    assert "3 models together" in said(outputs["oof"])
    assert "2/2" in html_of(outputs["search"])
    assert len(ended_runs(tmp_path / "out", "*-winner-*")) == 1


def accepted(folder: Path) -> pd.DataFrame:
    """The competition's submission, checked against a sample made here."""
    digits = {f"digit_{digit}": 0.1 for digit in range(10)}
    sample = pd.DataFrame({"id": range(1500, 1797), **digits})
    nb.check_submission(folder / "submission.csv", sample)
    return pd.read_csv(folder / "submission.csv")


@pytest.mark.long
def test_the_competition_blends_and_submits(tmp_path: Path) -> None:
    outputs = executed(COMPETITION, tmp_path, k=3, epochs=3, rounds=10)
    assert "blend: 0." in said(outputs["blend"])
    assert "297 rows, accepted" in said(outputs["submit"])
    best = accepted(tmp_path).drop(columns="id").to_numpy().argmax(axis=1)
    assert (best == load_digits().target[1500:]).mean() > 0.75
    assert complaints(outputs) == []


@pytest.mark.long
@pytest.mark.parametrize("deadline", ["1s", "25s"])
def test_with_a_deadline_that_comes_early_the_submission_is_valid(
    tmp_path: Path, deadline: str
) -> None:
    """Before the first fold, and (on most machines) in the middle of the cross-validations."""
    outputs = executed(COMPETITION, tmp_path, deadline=deadline, rounds=400, epochs=200)
    assert "297 rows, accepted" in said(outputs["submit"])
    probabilities = accepted(tmp_path).drop(columns="id").to_numpy()
    assert probabilities.sum(axis=1) == pytest.approx(1.0)
    shown = "".join(out.get("text", "") for out in outputs["validate"])
    # Where the last model's folds were at work already, nothing else was to start.
    begun = deadline != "1s" and "the run's time is used up" in shown
    assert begun or "nothing new starts (nb.set_deadline)" in shown


def test_the_report_is_on_the_runs_in_a_folder_and_a_page_is_beside_them(tmp_path: Path) -> None:
    for name in ("20260101T000000-one-0001", "20260102T000000-two-0002"):
        diary = trained({"val_loss": [0.5, 0.25]})
        ended = {"status": "completed", "metrics": {"val_loss": 0.25}}
        write_run(tmp_path / "out", name, events=diary, ended=ended)
    result = nb.run_notebook(
        REPORT, tmp_path / "report.ipynb", {"folder": str(tmp_path / "out")}, html=False
    )
    page = tmp_path / "out/report.html"
    assert result.values == {
        "runs": 2,
        "statuses": ["completed", "completed"],
        "page": str(page),
    }
    assert "one-0001" in page.read_text()
    cells = {cell.id: cell for cell in nbformat.read(result.output, as_version=4).cells}
    assert "0.2500</td>" in html_of(cells["runs"].outputs)
    assert "mathjax_ignore" in html_of(cells["runs"].outputs)  # a name may have dollar signs
    assert html_of(cells["pages"].outputs).count("two-0002") >= 1
    assert "<img alt=" in html_of(cells["comparison"].outputs)


@pytest.mark.long
def test_metric_learning_takes_a_folder_of_images(tmp_path: Path) -> None:
    pixels, labels = load_digits(return_X_y=True)
    for number in range(300):
        file = tmp_path / f"photos/class {labels[number]}/{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels[number].reshape(8, 8) * 15).astype(np.uint8)).save(file)
    epochs = {f"model.stage{stage}.train.epochs": 4 for stage in (1, 2)}
    settings = {"data.size": 16, "model.samples_per_class": 4, **epochs}
    outputs = executed(METRIC, tmp_path, folder=str(tmp_path / "photos"), overrides=settings)
    shown = [one for cell in outputs.values() for one in cell if "image/png" in one.get("data", {})]
    assert len(shown) == 3  # confusion, embeddings, neighbours
    [run] = (tmp_path / "out").glob("*-metric_learning-*")
    result = last_of(run)
    assert (result.status, result.processes) == ("completed", 2)
    with np.load(run / "index.npz") as index:
        assert index["vectors"].shape == (300, 128)
        assert set(index["classes"]) == {f"class {number}" for number in range(10)}
        assert index["paths"][0] == str(tmp_path / "photos/class 0/0.png")
