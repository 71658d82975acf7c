"""LightGBM: a script of its documentation, its estimators, parameters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from boosting_functions import LIGHTGBM, check_folds, check_pruned_sweep, reports, samples, split
from frameworks import needs

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import MissingExtra
from nbtoolkit.integrations import boosting as nbb
from nbtoolkit.worker.context import RunContext

pytestmark = needs("lightgbm")


def launched(
    train: Any, folder: Path, *, start: Literal["forkserver", "inline"] = "inline", **overrides: Any
) -> nb.RunResult:
    more = {name.replace("__", "."): value for name, value in overrides.items()}
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder), **more}
    config = nb.load_config(env=None, overrides=settings)
    return nb.launch(train, config, processes=1, display="off", start=start)


# --- microsoft/LightGBM, examples/python-guide/simple_example.py


def simple_example(config: Config, ctx: RunContext | None) -> Any:
    import lightgbm as lgb
    from sklearn.metrics import root_mean_squared_error

    (X_train, y_train), (X_test, y_test) = split(ctx)
    lgb_train = lgb.Dataset(X_train, y_train)
    lgb_eval = lgb.Dataset(X_test, y_test, reference=lgb_train)
    params = {
        "boosting_type": "gbdt",
        "objective": "regression",
        "metric": {"l2", "l1"},
        "num_leaves": 31,
        "learning_rate": 0.05,
        "feature_fraction": 0.9,
        "bagging_fraction": 0.8,
        "bagging_freq": 5,
        "verbose": -1,
        "num_threads": 1,
    }
    if ctx is None:
        gbm = lgb.train(
            {**params, "seed": config.seed},
            lgb_train,
            num_boost_round=20,
            valid_sets=lgb_eval,
            callbacks=[lgb.early_stopping(stopping_rounds=5, verbose=False)],
        )
    else:
        gbm = lgb.train(
            **nbb.lightgbm(  # nbtoolkit
                ctx,
                params,
                20,
                callbacks=[lgb.early_stopping(stopping_rounds=5, verbose=False)],
            ),
            train_set=lgb_train,
            valid_sets=lgb_eval,
        )
    predictions = gbm.predict(X_test, num_iteration=gbm.best_iteration)
    return {"rmse": root_mean_squared_error(y_test, predictions), "predictions": predictions}


def test_the_simple_example_gives_what_it_gives_alone(tmp_path: Path) -> None:
    assert inspect.getsource(simple_example).count("# nbtoolkit") == 1
    alone = simple_example(Config(), None)
    result = launched(simple_example, tmp_path, start="forkserver")
    np.testing.assert_array_equal(result.value["predictions"], alone["predictions"])
    assert result.metrics["rmse"] == alone["rmse"]
    assert reports(result.paths.folder) == [10, 20]
    assert {"valid_0_l1", "valid_0_l2"} < set(result.metrics)


@pytest.mark.apart
def test_the_simple_example_runs_in_folds_and_in_a_sweep(tmp_path: Path) -> None:
    check_folds(simple_example, tmp_path, "valid_0_l2")
    check_pruned_sweep(simple_example, tmp_path, "valid_0_l2")


def estimator(config: Config, ctx: RunContext) -> dict[str, Any]:
    import lightgbm as lgb

    x, y = samples()
    done = []

    def fail_once(env: Any) -> None:
        done.append(env.iteration + 1)
        if env.iteration + 1 == 15 and not Path(config.data.folder, "failed").exists():
            Path(config.data.folder, "failed").touch()
            raise InterruptedError("as a killed run")

    made = nbb.lightgbm(ctx, LIGHTGBM, 30, callbacks=[fail_once])
    model = lgb.LGBMClassifier(n_estimators=made["num_boost_round"], **made["params"])
    model.fit(
        x[:400],
        y[:400],
        eval_set=[(x[400:], y[400:])],
        callbacks=made["callbacks"],
        init_model=made["init_model"],
    )
    return {"trees": model.booster_.num_trees(), "first": done[0]}


# LightGBM 4.7 has eval_X and eval_y in its place, which 4.0 has not.
@pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated")
def test_an_estimator_reports_and_resumes(tmp_path: Path) -> None:
    settings = {"data__folder": str(tmp_path), "checkpoint__every_steps": 10}
    with pytest.raises(InterruptedError):
        launched(estimator, tmp_path, **settings)
    result = launched(estimator, tmp_path, **settings)
    assert result.value == {"trees": 30, "first": 11}
    assert reports(result.paths.folder) == [10, 20, 30]
    assert result.metrics["valid_0_auc"] > 0.7


# --- parameters


def test_parameters_come_from_settings_plan_and_seed(tmp_path: Path) -> None:
    def train(config: Config, ctx: RunContext) -> list[dict[str, Any]]:
        own = {"n_jobs": 3, "random_state": 5, "device": "cpu", "num_leaves": 7}
        made, kept = nbb.lightgbm(ctx, {}), nbb.lightgbm(ctx, own, name="kept")
        return [made["params"], kept["params"], {"n": ctx.plan.threads_per_rank}]

    result = launched(train, tmp_path, seed=9, model__num_leaves=11)
    made, kept, threads = result.value
    assert made == {"num_leaves": 11, "num_threads": threads["n"], "seed": 9}
    assert kept == {"num_leaves": 11, "n_jobs": 3, "random_state": 5, "device": "cpu"}


def test_a_number_of_rounds_in_the_parameters_counts(tmp_path: Path) -> None:
    def train(config: Config, ctx: RunContext) -> list[int]:
        own = nbb.lightgbm(ctx, {"n_estimators": 7}, 5, name="own")
        return [nbb.lightgbm(ctx, {}, 5)["num_boost_round"], own["num_boost_round"]]

    assert launched(train, tmp_path).value == [5, 7]
    assert launched(train, tmp_path, model__num_trees=9).value == [9, 9]


def test_an_old_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old" / "lightgbm-3.3.5.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: lightgbm\nVersion: 3.3.5\n")
    monkeypatch.syspath_prepend(old.parent)
    with pytest.raises(MissingExtra, match=r"lightgbm 4 or newer[\s\S]*lightgbm>=4"):
        launched(lambda config, ctx: nbb.lightgbm(ctx, {}), tmp_path)
