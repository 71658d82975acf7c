"""cv.predict and nb.predict_mean with real processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import rankdata
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import nbtoolkit as nb
from nbtoolkit.errors import DeadlinePassed, FitError, FoldError

X = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(dim=1)
TEST = torch.randn(41, 6, generator=torch.Generator().manual_seed(1))
FOLDS = nb.make_folds(Y, k=3)


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))


def fits(config: Any, ctx: Any) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    fitted, held_out = ctx.fold.train_indices, ctx.fold.valid_indices
    data, valid = (X[fitted], Y[fitted]), (X[held_out], Y[held_out])
    model = make_model()
    scores = nb.fit(ctx, config, model, data, valid, loss=cross_entropy)
    return {**scores, "predictions": nb.predict(ctx, model, valid).softmax(dim=1)}


def own(config: Any, ctx: Any) -> dict[str, Any]:
    return {"score": 1.0, "slope": float(ctx.fold.index)}


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    runtime = {"output_dir": str(folder)}
    return {"tracking": {"mlflow": False}, "train": {"epochs": 1}, "runtime": runtime, **more}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> nb.CVResult:
    folder = tmp_path_factory.mktemp("fitted")
    return nb.cross_validate(fits, settings(folder), FOLDS, display="off")


@pytest.fixture(scope="module")
def sloped(tmp_path_factory: pytest.TempPathFactory) -> nb.CVResult:
    folder = tmp_path_factory.mktemp("sloped")
    return nb.cross_validate(own, settings(folder), FOLDS, display="off")


@pytest.fixture(autouse=True)
def removed() -> Iterator[None]:
    yield
    nb.set_deadline(None)


def test_models_of_fit_predict_as_loaded_by_hand(fitted: nb.CVResult) -> None:
    with torch.no_grad():
        outputs = torch.stack([model(TEST) for model in fitted.models(make_model())])
    found = fitted.predict(TEST, display="off")
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, outputs.mean(dim=0).numpy(), rtol=1e-5, atol=1e-6)
    probabilities = fitted.predict(
        TEST, transform=lambda outputs: outputs.softmax(dim=1), average="none", display="off"
    )
    np.testing.assert_allclose(probabilities, outputs.softmax(dim=2).numpy(), rtol=1e-5)
    assert list((fitted.paths.folder / "predictions").iterdir()) == []


@pytest.mark.long
def test_models_of_fit_predict_their_validation_sets_as_out_of_fold(fitted: nb.CVResult) -> None:
    for fold in FOLDS:
        one = fitted.predict(
            X[fold.valid_indices],
            transform=lambda outputs: outputs.softmax(dim=1),
            folds=[fold.index],
            display="off",
        )
        np.testing.assert_allclose(one, fitted.oof[fold.valid_indices], rtol=1e-5)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(TEST)

    def __getitem__(self, index: int) -> Any:
        return TEST[index], torch.tensor(0)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(TEST)


@pytest.mark.long
def test_a_test_set_is_what_predict_takes(fitted: nb.CVResult) -> None:
    expected = fitted.predict(TEST, display="off")
    for test in (TEST.numpy(), (TEST, torch.zeros(41)), Rows(), Stream()):
        np.testing.assert_allclose(fitted.predict(test, display="off"), expected, rtol=1e-5)


@pytest.mark.long
def test_seeds_are_averaged_too(
    fitted: nb.CVResult, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = nb.cross_validate(fits, settings(tmp_path, seed=5), FOLDS, display="off")
    both = nb.predict_mean([fitted, other], TEST, display="text")
    assert "predicting with the models of 6 folds\n" in capfd.readouterr().out
    single = [cv.predict(TEST, display="off") for cv in (fitted, other)]
    assert not np.allclose(*single)
    np.testing.assert_allclose(both, np.mean(single, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_ranks_share_the_rows_of_models_of_fit_and_the_folds_of_a_function(tmp_path: Path) -> None:
    two = settings(tmp_path, distributed={"enabled": True, "world_size": 2})
    cv = nb.cross_validate(fits, two, FOLDS, display="off")
    with torch.no_grad():
        outputs = torch.stack([model(TEST) for model in cv.models(make_model())])
    found = cv.predict(TEST, display="off")
    np.testing.assert_allclose(found, outputs.mean(dim=0).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cv.predict(TEST[:1], display="off"), found[:1], rtol=1e-5)

    def by_hand(run: nb.FoldRun, test: Any) -> Any:
        run.ctx.raise_if_stopped()  # the other rank does not make this call
        assert (run.ctx.world_size, len(test)) == (1, 41)
        rows = nb.predict(run.ctx, run.load_into(make_model()), test)
        return torch.cat([rows, torch.full((41, 1), os.getpid())], dim=1)

    rows = cv.predict(TEST, predict=by_hand, average="none", display="off")
    np.testing.assert_allclose(rows[:, :, :3], outputs.numpy(), rtol=1e-5, atol=1e-6)
    first, second, third = [set(model[:, 3]) for model in rows]
    assert first == third
    assert len(first | second) == 2


# --- functions of the user's ---


def line(run: nb.FoldRun, test: pd.DataFrame) -> Any:
    assert str(run.ctx.device) == "cpu"
    assert run.fold.valid_indices.tolist() == FOLDS.valid_indices(run.fold.index).tolist()
    assert len(test) == 41  # the whole test set
    return test["x"].to_numpy() * run.value["slope"] + os.getpid() * 0


def test_a_function_of_the_users_predicts_with_what_train_returned(sloped: nb.CVResult) -> None:
    x = np.arange(41.0)
    found = sloped.predict(pd.DataFrame({"x": x}), predict=line, display="off")
    np.testing.assert_allclose(found, x * (0 + 1 + 2) / 3)
    ranked = sloped.predict(
        x, predict=lambda run, test: test * (run.value["slope"] - 1), average="ranks", display="off"
    )
    by_hand = [rankdata(x * (slope - 1)) / 41 for slope in range(3)]
    np.testing.assert_allclose(ranked, np.mean(by_hand, axis=0))


def test_what_it_raises_is_raised_here_with_the_fold(sloped: nb.CVResult) -> None:
    def fails(run: nb.FoldRun, test: Any) -> Any:
        if run.fold.index == 1:
            raise KeyError("no such column")
        return test

    with pytest.raises(KeyError, match="no such column") as raised:
        sloped.predict(np.ones(4), predict=fails, display="off")
    assert f"in the prediction of fold 1 of {sloped.paths.run_id}" in str(raised.value.__notes__)


@pytest.mark.parametrize(
    ("predict", "match"),
    [
        (lambda run, test: test[:2], r"have the shape \(2,\), .*; the test set has 4 rows"),
        (lambda run, test: np.ones((4, 1 + run.fold.index)), r"shape \(4, 2\), those of fold 0 of"),
        (lambda run, test: np.array([1, 0, 1, 0]), "are int64: they have no mean"),
    ],
)
def test_predictions_that_have_no_mean_are_refused(
    sloped: nb.CVResult, predict: Any, match: str
) -> None:
    with pytest.raises(FoldError, match=match):
        sloped.predict(np.ones(4), predict=predict, display="off")


# --- what is refused, before anything starts ---


def test_wrong_arguments_are_refused(sloped: nb.CVResult, fitted: nb.CVResult) -> None:
    with pytest.raises(FoldError, match=r"kept no model: (.|\n)*keep_predictor(.|\n)*predict=f"):
        sloped.predict(np.ones(4))
    with pytest.raises(FoldError, match=r"1 results, 0 rows and average='mean'"):
        fitted.predict(TEST[:0])
    with pytest.raises(FoldError, match=r"average='median'(.|\n)*'mean', 'ranks' or 'none'"):
        fitted.predict(TEST, average="median")
    with pytest.raises(FoldError, match=r"folds of .* are not done: 3 \(it ended as completed\)"):
        fitted.predict(TEST, folds=[0, 3])
    with pytest.raises(FoldError, match=r"given 0 results"):
        nb.predict_mean([], TEST)
    assert not list(fitted.paths.folder.glob("predictions/*"))


def test_a_test_set_of_other_columns_is_named(fitted: nb.CVResult) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fitted.predict(TEST[:, :5], display="off")
    assert "in the prediction of fold" in "".join(caught.value.__notes__)


def unpicklable(config: Any, ctx: Any) -> None:
    model = make_model()
    model.lock = threading.Lock()
    rows = X[ctx.fold.train_indices], Y[ctx.fold.train_indices]
    nb.fit(ctx, config, model, rows, None, loss=cross_entropy)


def halved(samples: list[Any]) -> Any:
    rows, labels = zip(*samples, strict=True)
    return torch.stack(rows) / 2, torch.stack(labels)


def fits_a_loader(config: Any, ctx: Any) -> None:
    data = TensorDataset(X[ctx.fold.train_indices], Y[ctx.fold.train_indices])
    loader = DataLoader(data, batch_size=10, shuffle=True, collate_fn=halved)
    nb.fit(ctx, config, make_model(), loader, None, loss=cross_entropy)


def fits_with_a_step(config: Any, ctx: Any) -> None:
    def pairs(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        return model(inputs), targets

    def columns(model: Any, batch: Any) -> Any:
        return model(batch[0]), batch[1]

    def either(model: Any, batch: Any) -> Any:
        inputs, targets = batch if isinstance(batch, (tuple, list)) else (batch, None)
        return model(inputs), targets

    data = (X[ctx.fold.train_indices], Y[ctx.fold.train_indices])
    step = {"pairs": pairs, "columns": columns, "either": either}[config.model["step"]]
    nb.fit(ctx, config, make_model(), data, None, loss=cross_entropy, step=step)


@pytest.mark.parametrize("step", ["pairs", "columns"])
def test_a_step_that_needs_labels_is_told_what_to_do_with_a_test_set(
    step: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, model={"step": step})
    cv = nb.cross_validate(fits_with_a_step, config, FOLDS, display="off")
    with pytest.raises((ValueError, FitError)) as raised:
        cv.predict(TEST, display="off")
    notes = "\n".join(raised.value.__notes__)
    assert "must also take a batch without targets, and return (outputs, None)" in notes
    assert cv.predict((TEST, torch.zeros(41)), display="off").shape == (41, 3)


@pytest.mark.long
def test_a_step_that_follows_the_advice_predicts_without_labels(tmp_path: Path) -> None:
    config = settings(tmp_path, model={"step": "either"})
    cv = nb.cross_validate(fits_with_a_step, config, FOLDS, display="off")
    assert cv.predict(TEST, display="off").shape == (41, 3)


@pytest.mark.long
def test_the_collate_of_a_loader_prepares_the_test_set_too(tmp_path: Path) -> None:
    cv = nb.cross_validate(fits_a_loader, settings(tmp_path), FOLDS, display="off")
    with torch.no_grad():
        outputs = torch.stack([model(TEST / 2) for model in cv.models(make_model())])
    found = cv.predict(Rows(), display="off")
    np.testing.assert_allclose(found, outputs.mean(dim=0).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_model_that_cannot_be_pickled_is_named_when_it_is_needed(tmp_path: Path) -> None:
    cv = nb.cross_validate(unpicklable, settings(tmp_path), FOLDS, display="off")
    with pytest.raises(FitError, match=r"could not keep the model of fold 0: .*pickle(.|\n)*predi"):
        cv.predict(TEST, display="off")

    def by_hand(run: nb.FoldRun, test: Any) -> Any:
        return nb.predict(run.ctx, run.load_into(make_model()), test)

    assert cv.predict(TEST, predict=by_hand, display="off").shape == (41, 3)


# --- the deadline ---


def slow_after_two(config: Any, ctx: Any) -> dict[str, Any]:
    for step in range(10_000 if ctx.fold.index == 2 else 0):
        ctx.report({"val_loss": 1.0}, step=step)
        time.sleep(0.01)
    return own(config, ctx)


@pytest.mark.long
def test_after_a_deadline_the_folds_that_are_done_predict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nb.set_deadline(60, reserve=54)
    cv = nb.cross_validate(slow_after_two, settings(tmp_path), FOLDS, display="off")
    assert (cv.status, cv.finished) == ("deadline", [0, 1])
    with pytest.raises(DeadlinePassed, match="nothing new starts"):
        nb.launch(own, settings(tmp_path))
    found = cv.predict(np.ones(4), predict=lambda run, test: test * run.value["slope"])
    np.testing.assert_allclose(found, [0.5] * 4)
    out = capfd.readouterr().out
    assert (
        "predicting with the models of 2 folds (folds that are not done, and are left out: 1)"
        in out
    )
    with pytest.raises(FoldError, match=r"folds of .* are not done: 2 \(it ended as deadline\)"):
        cv.predict(np.ones(4), predict=line, folds=[2])
    # A deadline in the middle of the predictions: the models that are done count.
    nb.set_deadline(4, reserve=0.1)

    def slow(run: nb.FoldRun, test: Any) -> Any:
        for _ in range(10_000 * run.fold.index):
            time.sleep(0.01)
            run.ctx.raise_if_stopped()
        return test

    np.testing.assert_allclose(cv.predict(np.ones(4), predict=slow), 1.0)
    assert "it ended early: 1 of 2 models have predicted" in capfd.readouterr().out
    with pytest.raises(DeadlinePassed, match=r"the notebook's deadline, .* ago: nothing new"):
        cv.predict(np.ones(4), predict=slow)
    # A function that does not look at the time is cut off.
    nb.set_deadline(4, reserve=0.1)
    began = time.monotonic()

    def stuck(run: nb.FoldRun, test: Any) -> Any:
        time.sleep(600 * run.fold.index)
        return test

    np.testing.assert_allclose(cv.predict(np.ones(4), predict=stuck), 1.0)
    assert time.monotonic() - began < 60
    assert "it ended early: 1 of 2 models have predicted" in capfd.readouterr().out
