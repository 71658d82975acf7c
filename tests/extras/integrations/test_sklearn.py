"""Estimators and pipelines of scikit-learn in runs, folds and sweeps."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
from frameworks import needs
from kernels import descendants, until
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.metrics import accuracy_score, log_loss, make_scorer
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import (
    CheckpointError,
    FoldError,
    MissingExtra,
    PlanError,
    WorkerDied,
)
from nbtoolkit.integrations import sklearn as nbs
from nbtoolkit.worker.context import RunContext

X, Y = load_iris(return_X_y=True)
skops = needs("skops")


def config_in(folder: Path, **overrides: Any) -> nb.Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out")}
    more = {name.replace("__", ".", 1): value for name, value in overrides.items()}
    return nb.load_config(env=None, overrides={**settings, "data.folder": str(folder), **more})


def inline(train: Any, folder: Path, **overrides: Any) -> nb.RunResult:
    config = config_in(folder, **overrides)
    return nb.launch(train, config, processes=1, display="off", start="inline")


def notes(result: nb.RunResult) -> str:
    return "\n".join(e.text for e in nb.attach(result.paths.folder).events() if e.type == "note")


# --- https://scikit-learn.org/stable/getting_started.html, "Pipelines: chaining ..."


def getting_started(config: Config, ctx: RunContext | None) -> Any:
    pipe = make_pipeline(StandardScaler(), LogisticRegression())
    X, y = load_iris(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
    if ctx is None:
        pipe.fit(X_train, y_train)
        return accuracy_score(pipe.predict(X_test), y_test)
    return nbs.fit(ctx, pipe, X_train, y_train, X_test, y_test)  # nbtoolkit: for both lines


@pytest.mark.apart
@skops
def test_the_page_getting_started_in_a_launch_and_a_sweep(tmp_path: Path) -> None:
    assert inspect.getsource(getting_started).count("# nbtoolkit") == 1
    config = config_in(tmp_path)
    result = nb.launch(getting_started, config, processes=1, display="off")
    assert result.metrics["val_accuracy"] == getting_started(config, None)
    X_test = train_test_split(*load_iris(return_X_y=True), random_state=0)[1]
    loaded = nbs.load(result.paths.folder)
    np.testing.assert_array_equal(loaded.predict(X_test), result.value["predictions"])
    swept = nb.sweep(
        getting_started,
        config,
        {
            "study": {"metric": "val_accuracy", "sampler": "grid"},
            "space": {"model.logisticregression__C": [1e-6, 1.0]},
        },
        n_trials=2,
        display="off",
    )
    assert swept.best_params == {"model.logisticregression__C": 1.0}
    assert swept.best_value == result.metrics["val_accuracy"]
    assert swept.trials["value"].min() < swept.best_value


# --- fit


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("array", marks=pytest.mark.long),
        pytest.param("frame", marks=pytest.mark.apart),
        pytest.param("list", marks=pytest.mark.apart),
    ],
)
def test_folds_give_the_predictions_of_cross_val_predict(tmp_path: Path, kind: str) -> None:
    data = {"array": X, "frame": pd.DataFrame(X), "list": X.tolist()}[kind]
    pipe = make_pipeline(StandardScaler(), SVC())
    train = nbs.train_function(pipe, data, Y, method="decision_function")
    folds = nb.make_folds(Y, k=3)
    cv = nb.cross_validate(train, config_in(tmp_path), folds, display="off")
    splits = [(fold.train_indices, fold.valid_indices) for fold in folds]
    alone = cross_val_predict(pipe, X, Y, cv=splits, method="decision_function")
    np.testing.assert_allclose(cv.oof, alone)
    assert set(cv.mean) == {"val_accuracy"}
    fitted = [clone(pipe).fit(X[split[0]], Y[split[0]]) for split in splits]
    of_all = np.mean([one.decision_function(X[:40]) for one in fitted], axis=0)
    np.testing.assert_allclose(cv.predict(data[:40], display="off"), of_all)


def test_a_factory_reads_the_settings_itself(tmp_path: Path) -> None:
    def factory(config: Config) -> Any:
        return {"ridge": Ridge, "svc": SVC}[config.model.kind]()

    x, y = load_diabetes(return_X_y=True)
    train = nbs.train_function(factory, x[:300], y[:300], X_valid=x[300:], y_valid=y[300:])
    result = inline(train, tmp_path, model__kind="ridge")
    expected = Ridge().fit(x[:300], y[:300]).score(x[300:], y[300:])
    assert result.metrics["val_r2"] == pytest.approx(expected)


def test_metrics_are_names_scorers_and_functions(tmp_path: Path) -> None:
    metrics = {
        "accuracy": "accuracy",
        "log_loss": make_scorer(log_loss, response_method="predict_proba"),
        "same": accuracy_score,
    }
    train = nbs.train_function(LogisticRegression(max_iter=500), X, Y, metrics=metrics)
    result = inline(train, tmp_path)
    assert set(result.metrics) == {"train_accuracy", "train_log_loss", "train_same"}
    assert result.metrics["train_same"] == result.metrics["train_accuracy"]
    assert "predictions" not in result.value
    assert set(inline(nbs.train_function(KMeans(3), X, Y), tmp_path).metrics) == {"train_score"}


class Threads(LogisticRegression):
    """Knows how many threads or processes a fit may use."""

    def fit(self, X: Any, y: Any) -> Any:
        self.threads_ = joblib.effective_n_jobs(None)
        return super().fit(X, y)


def threads_of(estimator: Any, X: Any, y: Any) -> float:
    return float(estimator[-1].threads_)


def test_n_jobs_is_the_plans_where_it_is_not_set(tmp_path: Path) -> None:
    pipe = make_pipeline(StandardScaler(), Threads())
    result = inline(nbs.train_function(pipe, X, Y, metrics={"threads": threads_of}), tmp_path)
    assert result.metrics["train_threads"] == result.plan.threads_per_rank
    assert joblib.effective_n_jobs(None) == 1


@pytest.mark.apart
def test_a_search_inside_an_estimator_starts_no_processes(tmp_path: Path) -> None:
    search = GridSearchCV(Threads(max_iter=500), {"C": [0.1, 1.0]}, cv=2, n_jobs=2)
    pids: list[int] = []

    def processes(estimator: Any, X: Any, y: Any) -> float:
        pids.extend(descendants(os.getpid()) - before)
        return 0.0

    before = descendants(os.getpid())  # the fork server of other tests
    inline(nbs.train_function(search, X, Y, metrics={"processes": processes}), tmp_path)
    assert pids == []


def test_two_estimators_are_two_functions() -> None:
    from nbtoolkit.run.identity import Identity

    made = [
        nbs.train_function(estimator, X, Y) for estimator in (SVC(), SVC(), SVC(C=2.0), Ridge())
    ]
    hashes = [Identity.of({}, train).hash for train in made]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


# --- partial_fit


def dying(config: Config, ctx: RunContext) -> dict[str, Any]:
    marker = Path(config.data.folder) / "died"

    def accuracy(y: Any, predicted: Any) -> float:
        calls.append(1)
        if len(calls) == 4 and config.data.get("die") and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return accuracy_score(y, predicted)

    calls: list[int] = []
    model = SGDClassifier(random_state=0)
    value = nbs.fit(ctx, model, X, Y, X, Y, metrics={"accuracy": accuracy}, epochs=6)
    return {**value, "epochs": len(calls) - 1}  # the last call is of the result


def epochs_of(result: nb.RunResult) -> list[int]:
    events = nb.attach(result.paths.folder).events()
    return [e.step for e in events if e.type == "report" and e.step is not None]


@skops
@pytest.mark.apart
def test_partial_fit_reports_each_epoch_and_resumes_after_a_kill(tmp_path: Path) -> None:
    settings = {"checkpoint__every_steps": 1}
    whole = nb.launch(dying, config_in(tmp_path, **settings), processes=1, display="off")
    assert epochs_of(whole) == [1, 2, 3, 4, 5, 6]
    config = config_in(tmp_path, data__die=True, **settings)
    with pytest.raises(WorkerDied):
        nb.launch(dying, config, processes=1, display="off")
    rest = nb.launch(dying, config, processes=1, display="off")
    assert rest.value["epochs"] == 3
    assert epochs_of(rest) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(rest.value["predictions"], whole.value["predictions"])


def slow_accuracy(y: Any, predicted: Any) -> float:
    import time

    time.sleep(0.02)
    return float(accuracy_score(y, predicted))


@skops
@pytest.mark.apart
def test_partial_fit_stops_on_request_and_is_saved(tmp_path: Path) -> None:
    options = {"metrics": {"accuracy": slow_accuracy}, "epochs": 10_000}
    train = nbs.train_function(SGDClassifier(), X, Y, **options)
    handle = nb.launch(train, config_in(tmp_path), processes=1, display="off", wait=False)
    until(lambda: [e for e in handle.events() if e.type == "report"], "a report")
    handle.stop()
    result = handle.result()
    assert result.status == "stopped"
    assert (result.paths.checkpoints / "epochs.skops").is_file()


@pytest.mark.apart
def test_partial_fit_is_pruned(tmp_path: Path) -> None:
    train = nbs.train_function(SGDClassifier(), X, Y, metrics=["accuracy"], epochs=20)
    rates = [1e-4, 1e-4, 1e4]  # the last one leaves nothing of the weights
    result = nb.sweep(
        train,
        config_in(tmp_path),
        {
            "study": {
                "metric": "train_accuracy",
                "sampler": "random",
                "pruner": "percentile",
                "pruner_options": {"percentile": 50.0, "n_startup_trials": 1, "n_warmup_steps": 3},
            },
            "space": {"model.alpha": {"type": "float", "low": 1e-5, "high": 1e5, "log": True}},
            "first_trials": [{"model.alpha": rate} for rate in rates],
        },
        n_trials=3,
        display="off",
    )
    assert result.trials["state"].iloc[2] == "pruned"


# --- wrong calls, and what cannot be done


def test_what_cannot_be_stopped_says_so_once(tmp_path: Path) -> None:
    result = inline(nbs.train_function(SVC(), X, Y), tmp_path)
    assert notes(result).count("SVC.fit is one call: a stop request or a pruner cannot") == 1


def test_a_setting_that_is_no_parameter_is_refused(tmp_path: Path) -> None:
    pipe = make_pipeline(StandardScaler(), SVC())
    with pytest.raises(ValueError, match=r"Invalid parameter 'CC' for estimator SVC"):
        inline(nbs.train_function(pipe, X, Y), tmp_path, model__svc__CC=1.0)


def test_wrong_arguments_are_refused_before_the_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="acuracy"):
        inline(nbs.train_function(SVC(), X, Y, metrics=["acuracy"]), tmp_path)
    with pytest.raises(AttributeError, match="'SVC' object has no attribute 'partial_fit'"):
        inline(nbs.train_function(SVC(), X, Y, epochs=3), tmp_path)
    with pytest.raises(TypeError, match="metric"):
        nbs.train_function(SVC(), X, Y, metric="accuracy")
    with pytest.raises(PlanError, match=r"trains in one process here, and this run has 2 ranks"):
        nb.launch(nbs.train_function(SVC(), X, Y), config_in(tmp_path), processes=2, display="off")


@pytest.mark.apart
def test_folds_of_other_samples_are_refused(tmp_path: Path) -> None:
    train = nbs.train_function(SVC(), X, Y)
    with pytest.raises(FoldError, match=r"the folds are of 300 samples or more, and X has 150"):
        nb.cross_validate(
            train, config_in(tmp_path), nb.make_folds([0, 1] * 150, k=2), display="off"
        )


class Own(LogisticRegression):
    """A class of the user's."""


@skops
def test_an_estimator_of_another_package_is_loaded_if_it_is_trusted(tmp_path: Path) -> None:
    from skops.io.exceptions import UntrustedTypesFoundException

    result = inline(nbs.train_function(Own(max_iter=500), X, Y), tmp_path)
    with pytest.raises(UntrustedTypesFoundException, match=r"Own"):
        nbs.load(result.paths.folder)
    loaded = nbs.load(result.paths.folder, trusted=[f"{__name__}.Own"])
    np.testing.assert_array_equal(loaded.predict(X), Own(max_iter=500).fit(X, Y).predict(X))
    with pytest.raises(CheckpointError, match=r"has no fitted estimator"):
        nbs.load(tmp_path)


def test_an_old_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old" / "scikit_learn-1.2.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.2.0\n")
    monkeypatch.syspath_prepend(old.parent)
    with pytest.raises(
        MissingExtra, match=r"scikit-learn 1\.4 or newer[\s\S]*pip install -U 'scikit-learn>="
    ):
        inline(nbs.train_function(SVC(), X, Y), tmp_path)
