"""XGBoost: a script of its documentation, its estimators, parameters."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from boosting_functions import XGBOOST, check_folds, check_pruned_sweep, reports, samples, split
from frameworks import needs

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import MissingExtra
from nbtoolkit.integrations import boosting as nbb
from nbtoolkit.worker.context import RunContext

pytestmark = needs("xgboost")


def launched(
    train: Any, folder: Path, *, start: Literal["forkserver", "inline"] = "inline", **overrides: Any
) -> nb.RunResult:
    more = {name.replace("__", "."): value for name, value in overrides.items()}
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder), **more}
    config = nb.load_config(env=None, overrides=settings)
    return nb.launch(train, config, processes=1, display="off", start=start)


# --- https://xgboost.readthedocs.io/en/stable/python/python_intro.html
# "Setting Parameters", "Training", "Early Stopping", "Prediction"


def introduction(config: Config, ctx: RunContext | None) -> Any:
    import xgboost as xgb

    (data, label), (test_data, test_label) = split(ctx)
    dtrain = xgb.DMatrix(data, label=label)
    dtest = xgb.DMatrix(test_data, label=test_label)
    param = {"max_depth": 2, "eta": 1, "objective": "binary:logistic"}
    param["nthread"] = 1
    param["eval_metric"] = ["auc", "logloss"]
    evallist = [(dtrain, "train"), (dtest, "eval")]
    num_round = 40
    quiet: dict[str, Any] = {"early_stopping_rounds": 10, "verbose_eval": False}
    if ctx is None:
        bst = xgb.train(param, dtrain, num_round, evals=evallist, **quiet)
    else:
        arguments = nbb.xgboost(ctx, param, num_round)  # nbtoolkit
        bst = xgb.train(dtrain=dtrain, evals=evallist, **quiet, **arguments)  # nbtoolkit
    ypred = bst.predict(dtest, iteration_range=(0, bst.best_iteration + 1))
    return {"predictions": ypred, "best": bst.best_iteration, "rounds": bst.num_boosted_rounds()}


def test_the_introduction_gives_what_it_gives_alone(tmp_path: Path) -> None:
    assert inspect.getsource(introduction).count("# nbtoolkit") == 2
    alone = introduction(Config(), None)
    result = launched(introduction, tmp_path, start="forkserver")
    np.testing.assert_array_equal(result.value["predictions"], alone["predictions"])
    assert result.metrics["best"] == alone["best"]
    steps = reports(result.paths.folder)
    assert steps == list(range(10, alone["rounds"] + 1, 10))
    assert {"train_auc", "eval_auc", "eval_logloss"} < set(result.metrics)


@pytest.mark.apart
def test_the_introduction_runs_in_folds_and_in_a_sweep(tmp_path: Path) -> None:
    check_folds(introduction, tmp_path, "eval_logloss")
    check_pruned_sweep(introduction, tmp_path, "eval_logloss")


def estimator(config: Config, ctx: RunContext) -> dict[str, Any]:
    import xgboost as xgb

    x, y = samples()
    rounds: list[int] = []

    class FailOnce(xgb.callback.TrainingCallback):  # type: ignore[misc]
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            rounds.append(model.num_boosted_rounds())
            if rounds[-1] == 15 and not Path(config.data.folder, "failed").exists():
                Path(config.data.folder, "failed").touch()
                raise InterruptedError("as a killed run")
            return False

    params = {**XGBOOST, "subsample": 0.5}
    made = nbb.xgboost(ctx, params, 30, callbacks=[FailOnce()])
    model = xgb.XGBClassifier(
        n_estimators=made["num_boost_round"], callbacks=made["callbacks"], **made["params"]
    )
    held_out = [(x[400:], y[400:])]
    model.fit(x[:400], y[:400], eval_set=held_out, xgb_model=made["xgb_model"], verbose=False)
    used = model.get_xgb_params()
    return {"rounds": model.get_booster().num_boosted_rounds(), "first": rounds[0], "used": used}


def test_an_estimator_reports_and_resumes(tmp_path: Path) -> None:
    settings = {"data__folder": str(tmp_path), "checkpoint__every_steps": 10, "seed": 3}
    with pytest.raises(InterruptedError):
        launched(estimator, tmp_path, **settings)
    result = launched(estimator, tmp_path, **settings)
    assert (result.value["rounds"], result.value["first"]) == (30, 11)
    # The seed is another than the first ten rounds had, which would draw the same samples.
    assert result.value["used"]["seed"] == 13
    assert reports(result.paths.folder) == [10, 20, 30]
    assert result.metrics["validation_0_auc"] > 0.7


# --- parameters


def test_parameters_come_from_settings_plan_and_seed(tmp_path: Path) -> None:
    def train(config: Config, ctx: RunContext) -> list[dict[str, Any]]:
        own = {"n_jobs": 3, "random_state": 5, "device": "cuda:1", "max_depth": 7}
        made, kept = nbb.xgboost(ctx, {}), nbb.xgboost(ctx, own, name="kept")
        return [made["params"], kept["params"], {"n": ctx.plan.threads_per_rank}]

    result = launched(train, tmp_path, seed=9, model__max_depth=4)
    made, kept, threads = result.value
    assert made == {"max_depth": 4, "nthread": threads["n"], "seed": 9, "device": "cpu"}
    assert kept == {"max_depth": 4, "n_jobs": 3, "random_state": 5, "device": "cuda:1"}


def test_the_device_is_the_plans_if_the_build_has_cuda(tmp_path: Path) -> None:
    import xgboost

    def train(config: Config, ctx: RunContext) -> dict[str, Any]:
        ctx.plan = dataclasses.replace(ctx.plan, device_type="cuda")
        return dict(nbb.xgboost(ctx, {})["params"])

    expected = "cuda:0" if xgboost.build_info()["USE_CUDA"] else "cpu"
    assert launched(train, tmp_path).value["device"] == expected


def test_an_old_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old" / "xgboost-1.7.6.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: xgboost\nVersion: 1.7.6\n")
    monkeypatch.syspath_prepend(old.parent)
    with pytest.raises(MissingExtra, match=r"xgboost 2 or newer[\s\S]*xgboost>=2"):
        launched(lambda config, ctx: nbb.xgboost(ctx, {}), tmp_path)
