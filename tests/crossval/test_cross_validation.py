"""nb.cross_validate with real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fold_functions as functions
import numpy as np
import pytest
import torch
from kernels import all_gone, descendants, run_folder, script, until
from records import owner_pid
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, FoldError, LaunchError, MissingExtra, ResumeError
from nbtoolkit.run.events import Event, EventReader
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tasks import digits

SMALL = nb.make_folds([0, 1, 2] * 10, k=3)


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    return config_in(tmp_path)


def config_in(folder: Path, **overrides: Any) -> nb.Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out")}
    more = {"data.folder": str(folder), **overrides}
    return nb.load_config(env=None, overrides={**settings, **more})


def quiet(train: Any, config: nb.Config, folds: nb.Folds = SMALL, **options: Any) -> nb.CVResult:
    return nb.cross_validate(train, config, folds, **{"display": "off", **options})


def began(folder: Path) -> Counter[int]:
    """How often each fold was started."""
    events = EventReader(RunPaths(folder).events).read()
    return Counter(e.fold for e in events if e.type == "fold" and e.state == "running")


def only_run(config: nb.Config) -> Path:
    (folder,) = Path(config.runtime.output_dir).iterdir()
    return folder


# --- what is found ---


def test_a_function_that_reads_no_fold_is_warned_of_once(config: nb.Config) -> None:
    heard: list[Event] = []
    cv = quiet(lambda config, ctx: {"loss": config.optim.lr}, config, on_event=heard.append)
    assert heard == list(EventReader(cv.paths.events).read())
    notes = [e.text for e in heard if e.type == "note"]
    assert sum("without reading ctx.fold" in text for text in notes) == 1
    cv = quiet(lambda config, ctx: {"loss": config.optim.lr + ctx.fold.index}, config)
    events = EventReader(cv.paths.events).read()
    assert not any(e.type == "note" and "ctx.fold" in e.text for e in events)


def writes_in_the_working_directory(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    import torch

    torch.save({"fold": ctx.fold.index}, "best.pt")  # torch opens it in C++
    Path("scores.txt").write_text("1")
    Path(f"fold-{ctx.fold.index}.txt").write_text("a name of its own")
    with open("log.txt", "a") as log:
        log.write("a line\n")
    (ctx.paths.folder / "own.txt").write_text("in the job's folder")
    ctx.save({"fold": ctx.fold.index}, kind="best")
    ctx.cached("shared on purpose", lambda: torch.ones(1))
    return {"loss": float(torch.load("best.pt")["fold"])}


def test_a_file_that_two_folds_write_is_named_with_the_calls_to_use(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cv = quiet(writes_in_the_working_directory, config)
    assert cv.shared_files == [str(tmp_path / "best.pt"), str(tmp_path / "scores.txt")]
    assert f"several jobs wrote {tmp_path / 'best.pt'}" in repr(cv)
    notes = [e.text for e in EventReader(cv.paths.events).read() if e.type == "note"]
    (told,) = [text for text in notes if "wrote the same file" in text]
    assert 'ctx.save(state, kind="best")' in told
    assert "ctx.paths.folder" in told


def plain_loop() -> tuple[np.ndarray, list[float]]:
    """What anybody would write without us: out-of-fold predictions, and each fold's error."""
    inputs, targets = load_diabetes(return_X_y=True)
    inputs = np.column_stack([inputs, np.ones(len(inputs))])
    predictions, errors = np.zeros(len(targets)), []
    for train, valid in KFold(5, shuffle=True, random_state=4).split(inputs):
        weights = np.linalg.lstsq(inputs[train], targets[train], rcond=None)[0]
        predictions[valid] = inputs[valid] @ weights
        errors.append(np.abs(predictions[valid] - targets[valid]).mean())
    return predictions, errors


def test_predictions_and_scores_are_those_of_a_plain_loop(config: nb.Config) -> None:
    folds = nb.make_folds(load_diabetes().target, kind="kfold", seed=4)
    cv = quiet(functions.least_squares, config, folds)
    predictions, errors = plain_loop()
    np.testing.assert_allclose(cv.oof, predictions, rtol=1e-9)
    assert cv.scores["mae"].tolist() == pytest.approx(errors, rel=1e-9)
    assert cv.mean["mae"] == pytest.approx(np.mean(errors))
    assert cv.std["mae"] == pytest.approx(np.std(errors, ddof=1))
    assert cv.status == "completed"
    assert cv.table.index.tolist() == [0, 1, 2, 3, 4]
    assert cv.table["mae"].tolist() == cv.scores["mae"].tolist()
    assert cv.table["n_valid"].tolist() == [89, 89, 88, 88, 88]
    assert (cv.table["n_train"] + cv.table["n_valid"]).tolist() == [442] * 5
    assert (cv.table["seconds"] > 0).all()
    assert f"mae={cv.mean['mae']:.4g} ±" in repr(cv)
    assert "5/5 folds" in cv._repr_html_()


@pytest.mark.long
def test_models_come_from_the_folds_checkpoints(tmp_path: Path) -> None:
    config = config_in(tmp_path, **{"train.epochs": 1, "optim.lr": 0.01, "model.hidden": 64})
    images, labels = digits.load()
    cv = quiet(digits.train, config, nb.make_folds(labels, k=3))
    models = cv.models(digits.make_model(config))
    with torch.no_grad():
        for fold, model in zip(cv.folds, models, strict=True):
            answers = model(images[fold.valid_indices]).argmax(dim=1).numpy()
            np.testing.assert_array_equal(answers, cv.oof[fold.valid_indices])
    accuracy = cv.oof == labels.numpy()
    counts = cv.table["n_valid"].to_numpy()
    assert accuracy.mean() == pytest.approx((cv.scores["val_accuracy"] * counts).sum() / 1797)
    assert accuracy.mean() > 0.5
    np.testing.assert_array_equal(cv.out_of_fold("labels"), labels)


@pytest.mark.parametrize("processes", [None, 2])
def test_each_fold_sees_its_own_samples_on_all_its_ranks(
    config: nb.Config, processes: int | None
) -> None:
    cv = quiet(functions.seen, config, processes=processes)
    for fold, value in zip(SMALL, cv.values, strict=True):
        assert value["index"] == fold.index
        assert value["train"] == fold.train_indices.tolist()
        assert value["valid"] == fold.valid_indices.tolist()
        assert value["world_size"] == (processes or 1)
        assert value["seed"] == 0
    assert cv.scores["score"].tolist() == [0.0, 1.0, 2.0]
    assert sorted(path.name for path in (cv.paths.folder / "folds").iterdir()) == ["0", "1", "2"]


# --- what goes wrong, and goes on ---


def test_a_fold_that_raises_raises_here_and_the_others_are_kept(config: nb.Config) -> None:
    with pytest.raises(KeyError, match="fold 1 is ill") as raised:
        quiet(functions.mends, config, processes=1)
    notes = "\n".join(raised.value.__notes__)
    assert "fold 1; the folds that are done are kept" in notes
    assert "fold_functions.py" in notes
    folder = only_run(config)
    before = began(folder)
    assert before[1] == 1
    (Path(config.data.folder) / "mended").touch()
    cv = quiet(functions.mends, config, processes=1)
    assert cv.paths.folder == folder
    assert cv.scores["score"].tolist() == [1.0, 2.0, 3.0]
    assert began(folder) == {0: 1, 1: 2, 2: 1}
    assert quiet(functions.mends, config, processes=1).paths.folder != folder  # it was completed


def test_a_fold_whose_process_is_killed_goes_on_from_its_checkpoint(config: nb.Config) -> None:
    cv = quiet(functions.dies_once, config)
    assert cv.scores["score"].tolist() == [7.0, 0.0, 0.0]
    assert began(cv.paths.folder) == {0: 2, 1: 1, 2: 1}


def test_stopped_it_keeps_what_is_done_and_goes_on_later(config: nb.Config) -> None:
    handle = nb.cross_validate(functions.waits, config, SMALL, wait=False, display="off")
    until(lambda: _state(handle.paths, 0) == "complete" and _reports(handle.paths, 1), "fold 0")
    handle.stop()
    cut = handle.result()
    assert (cut.status, handle.done()) == ("stopped", True)
    assert np.isnan(cut.scores["score"][1:]).all()
    assert cut.mean == {"score": 0.0}
    assert np.isnan(cut.std["score"])
    assert [value is None for value in cut.values] == [False, True, True]
    (Path(config.data.folder) / "open").touch()
    cv = quiet(functions.waits, config)
    assert cv.paths.folder == cut.paths.folder
    assert (cv.status, cv.scores["score"].tolist()) == ("completed", [0.0, 1.0, 2.0])
    assert began(cv.paths.folder)[0] == 1


@pytest.mark.long
@pytest.mark.parametrize("victim", ["kernel", "scheduler"])
def test_killed_in_the_middle_it_goes_on_in_another_kernel(
    config: nb.Config, tmp_path: Path, victim: str
) -> None:
    code = f"""
        import fold_functions
        config = nb.load_config({str(tmp_path / "config.yaml")!r}, env=None)
        folds = nb.make_folds([0, 1, 2] * 10, k=3)
        nb.cross_validate(fold_functions.waits, config, folds, display="off")
    """
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    with script(code, tmp_path) as kernel:
        paths = RunPaths(run_folder(tmp_path / "out"))
        until(lambda: _state(paths, 0) == "complete" and _reports(paths, 1), "fold 0, and 1 to run")
        scheduler = owner_pid(paths.folder)
        family = descendants(kernel.pid)
        os.kill(kernel.pid if victim == "kernel" else scheduler, signal.SIGKILL)
        kernel.process.wait(120)
        all_gone(family)
    (tmp_path / "open").touch()
    cv = quiet(functions.waits, config)
    assert cv.paths.folder == paths.folder
    assert cv.scores["score"].tolist() == [0.0, 1.0, 2.0]
    assert began(paths.folder)[0] == 1


def _state(paths: RunPaths, index: int) -> str | None:
    events = EventReader(paths.events).read()
    states = [e.state for e in events if e.type == "fold" and e.fold == index]
    return states[-1] if states else None


def _reports(paths: RunPaths, index: int) -> bool:
    events = EventReader(paths.folder / "folds" / str(index) / "events.jsonl").read()
    return any(event.type == "report" for event in events)


def test_it_is_attached_to_by_its_folder(config: nb.Config) -> None:
    handle = nb.cross_validate(functions.seen, config, SMALL, wait=False, display="off")
    other = nb.attach(handle.paths.folder)
    assert handle.result().scores["score"].tolist() == [0.0, 1.0, 2.0]
    assert other.result().scores["score"].tolist() == [0.0, 1.0, 2.0]


def test_a_named_one_must_have_the_same_folds_and_configuration(config: nb.Config) -> None:
    cv = quiet(functions.nothing, config)
    folder = cv.paths.folder
    with pytest.raises(FoldError, match=r"not those of the first session: k: 3 then, 2 now"):
        quiet(functions.nothing, config, nb.make_folds([0, 1, 2] * 10, k=2), resume=folder)
    other = config.with_overrides({"optim.lr": 0.5, "checkpoint.every_minutes": 3})
    with pytest.raises(
        ResumeError, match=r"another configuration: optim.lr: 0.001 then, 0.5 now\n"
    ):
        quiet(functions.nothing, other, resume=folder)
    with pytest.raises(ResumeError, match="there is no run nowhere"):
        quiet(functions.nothing, config, resume="nowhere")
    again = quiet(functions.nothing, config, resume=folder)
    assert again.scores["score"].tolist() == [1.0, 1.0, 1.0]
    assert began(folder) == {0: 1, 1: 1, 2: 1}
    changed = nb.make_folds(["a", "b", "c"] * 10, k=3)  # other targets: another cross-validation
    assert quiet(functions.nothing, config, changed).paths.folder != folder


def test_what_is_not_there_is_told(config: nb.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    cv = quiet(functions.nothing, config)
    with pytest.raises(FoldError, match="fold 0 returned no dict: there is no 'predictions'"):
        _ = cv.oof
    with pytest.raises(CheckpointError, match="fold 0: there is no checkpoint in"):
        cv.models(torch.nn.Linear(1, 1))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match="pip install pandas"):
        _ = cv.table


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda c: nb.cross_validate(functions.seen, c, 5),
            FoldError,
            "given 5 as folds\n.*make_f",
        ),
        (lambda c: nb.cross_validate(None, c, SMALL), LaunchError, "which is not a function"),
        (lambda c: quiet(functions.seen, c, display="loud"), LaunchError, "display='loud'"),
        (lambda c: quiet(functions.seen, c, processes=0), LaunchError, "processes=0 is not valid"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused(
    config: nb.Config, call: Callable[[nb.Config], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call(config)
    assert not Path(config.runtime.output_dir).exists()
