"""LightGBM and XGBoost in runs, folds and sweeps: stopped, killed, pruned, resumed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import boosting_functions as functions
import numpy as np
import pytest
from boosting_functions import ROUNDS, reports, samples
from frameworks import needs
from kernels import until

import nbtoolkit as nb
from nbtoolkit.errors import FitError, MissingExtra, PlanError, WorkerDied
from nbtoolkit.integrations import boosting as nbb

Train = Callable[..., dict[str, Any]]

LIGHTGBM = pytest.param(functions.with_lightgbm, marks=needs("lightgbm"), id="lightgbm")
XGBOOST = pytest.param(functions.with_xgboost, marks=needs("xgboost"), id="xgboost")
both = pytest.mark.parametrize("train", [LIGHTGBM, XGBOOST])
both_long = pytest.mark.parametrize(
    "train",
    [
        pytest.param(*one.values, marks=[*one.marks, pytest.mark.apart], id=one.id)
        for one in (LIGHTGBM, XGBOOST)
    ],
)


def config_in(folder: Path, **overrides: Any) -> nb.Config:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out")}
    settings |= {"data.folder": str(folder), "checkpoint.every_steps": 20}
    more = {name.replace("__", "."): value for name, value in overrides.items()}
    return nb.load_config(env=None, overrides={**settings, **more})


def quiet(train: Train, config: nb.Config, **options: Any) -> nb.RunResult:
    return nb.launch(train, config, **{"processes": 1, "display": "off", **options})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Train], nb.RunResult]:
    """A run of each function that nothing disturbs."""
    done: dict[Train, nb.RunResult] = {}

    def run(train: Train) -> nb.RunResult:
        if train not in done:
            done[train] = quiet(train, config_in(tmp_path_factory.mktemp("undisturbed")))
        return done[train]

    return run


@both
def test_every_tenth_round_is_reported(
    train: Train, undisturbed: Callable[[Train], nb.RunResult]
) -> None:
    result = undisturbed(train)
    assert (result.status, result.value["rounds"]) == ("completed", ROUNDS)
    assert reports(result.paths.folder) == [10, 20, 30, 40, 50, 60]
    assert 0.7 < result.metrics["held_out_auc"] < 1


@both_long
def test_a_killed_run_resumes_and_has_the_same_trees(
    tmp_path: Path, train: Train, undisturbed: Callable[[Train], nb.RunResult]
) -> None:
    config = config_in(tmp_path, data__die_at=45)
    with pytest.raises(WorkerDied):
        quiet(train, config)
    result = quiet(train, config)
    assert result.value["rounds"] == ROUNDS
    # Saved after 40 rounds; round 40 was reported before the kill.
    assert reports(result.paths.folder) == [10, 20, 30, 40, 50, 60]
    np.testing.assert_allclose(
        result.value["predictions"], undisturbed(train).value["predictions"], atol=1e-6
    )


@both_long
@pytest.mark.parametrize("how", ["stopped", "deadline"])
def test_a_run_that_ends_early_saves_and_resumes(tmp_path: Path, train: Train, how: str) -> None:
    overrides = {"runtime__time_budget": 2.0} if how == "deadline" else {}
    settings = {"checkpoint__every_steps": None, "checkpoint__every_minutes": None}
    config = config_in(tmp_path, data__slow=True, **settings, **overrides)
    handle = nb.launch(train, config, processes=1, display="off", wait=False)
    if how == "stopped":
        until(lambda: reports(handle.paths.folder), "a report")
        handle.stop()
    ended = handle.result()
    assert ended.status == how
    assert ROUNDS not in reports(ended.paths.folder)
    (tmp_path / "resumed").touch()
    rest = quiet(train, config.with_overrides({"runtime.time_budget": None}))
    assert (rest.paths.folder, rest.value["rounds"]) == (ended.paths.folder, ROUNDS)
    assert reports(rest.paths.folder) == [10, 20, 30, 40, 50, 60]


@both_long
def test_folds_give_the_predictions_of_a_plain_loop(tmp_path: Path, train: Train) -> None:
    x, y = samples()
    folds = nb.make_folds(y, k=3)
    cv = nb.cross_validate(train, config_in(tmp_path), folds, display="off")
    assert len(cv.oof) == len(y)
    assert ((cv.oof > 0.5) == y).mean() > 0.7
    assert cv.scores["held_out_auc"].min() > 0.7
    fold = folds[1]
    np.testing.assert_allclose(
        cv.oof[fold.valid_indices], plain(train, x, y, fold.train_indices, fold.valid_indices)
    )
    of_all = [plain(train, x, y, fold.train_indices, slice(0, 50)) for fold in folds]
    np.testing.assert_allclose(
        cv.predict(x[:50], display="off"), np.mean(of_all, axis=0), rtol=1e-6
    )


def plain(train: Train, x: Any, y: Any, fitted: Any, held_out: Any) -> Any:
    """What the framework alone predicts."""
    if train is functions.with_lightgbm:
        import lightgbm as lgb

        params = {**functions.LIGHTGBM, "seed": 0}
        booster = lgb.train(params, lgb.Dataset(x[fitted], y[fitted]), ROUNDS)
        return booster.predict(x[held_out])
    import xgboost as xgb

    params = {**functions.XGBOOST, "seed": 0}
    data = xgb.DMatrix(x[fitted], y[fitted])
    return xgb.train(params, data, ROUNDS).predict(xgb.DMatrix(x[held_out]))


SPACE = {"model.learning_rate": {"type": "float", "low": 1e-8, "high": 0.3}}
STUDY = {"metric": "held_out_auc", "sampler": "random"}


@both_long
def test_a_sweep_sets_parameters_and_prunes(tmp_path: Path, train: Train) -> None:
    pruner = {"pruner": "median", "pruner_options": {"n_startup_trials": 1}}
    rates = [0.1, 0.1, 1e-8]
    result = nb.sweep(
        train,
        config_in(tmp_path),
        {
            "study": {**STUDY, **pruner},
            "space": SPACE,
            "first_trials": [{"model.learning_rate": rate} for rate in rates],
        },
        n_trials=3,
        display="off",
    )
    # Two slots: the third trial starts when one of the others is done.
    assert list(result.trials["state"])[:2] == ["complete", "complete"]
    third = result.trials.iloc[2]
    assert third["state"] == "pruned"
    assert reports(result.paths.folder / third["folder"])[-1] < ROUNDS
    final = quiet(train, result.best_config)
    assert final.metrics["held_out_auc"] == pytest.approx(result.best_value)


@both_long
def test_a_killed_trial_is_retried_from_its_checkpoint(tmp_path: Path, train: Train) -> None:
    result = nb.sweep(
        train,
        config_in(tmp_path, data__die_at=45),
        {"study": {**STUDY, "pruner": "none"}, "space": SPACE, "budget": {"retries": 1}},
        n_trials=2,
        display="off",
    )
    assert list(result.trials["state"]) == ["complete", "complete"]
    notes = [e.text for e in nb.attach(result.paths.folder).events() if e.type == "note"]
    assert sum("is retried" in note for note in notes) == 1
    for folder in result.trials["folder"]:
        # One of them went on after 40 rounds, and so did not report earlier ones again.
        assert reports(result.paths.folder / folder) == [10, 20, 30, 40, 50, 60]


# --- wrong calls ---


@pytest.mark.parametrize("name", ["lightgbm", "xgboost"])
def test_a_framework_that_is_not_installed_is_named(tmp_path: Path, name: str) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed: make test runs this test")
    text = rf"No module named '{name}'[\s\S]*pip install -U '{name}>="
    with pytest.raises(MissingExtra, match=text):
        quiet(lambda config, ctx: getattr(nbb, name)(ctx, {}), config_in(tmp_path), start="inline")


@both_long
def test_several_ranks_are_refused(tmp_path: Path, train: Train) -> None:
    with pytest.raises(PlanError, match=r"trains in one process here, and this run has 2 ranks"):
        quiet(train, config_in(tmp_path), processes=2)


def twice_lightgbm(config: Any, ctx: Any, names: tuple[str, str] = ("lightgbm",) * 2) -> int:
    import lightgbm as lgb

    trees = 0
    for name in names:
        booster = lgb.train(
            **nbb.lightgbm(ctx, functions.LIGHTGBM, 3, name=name),
            train_set=lgb.Dataset(*samples(100)),
        )
        trees += booster.num_trees()
    return trees


def twice_xgboost(config: Any, ctx: Any, names: tuple[str, str] = ("xgboost",) * 2) -> int:
    import xgboost as xgb

    trees = 0
    for name in names:
        booster = xgb.train(
            **nbb.xgboost(ctx, functions.XGBOOST, 3, name=name),
            dtrain=xgb.DMatrix(*samples(100)),
        )
        trees += booster.num_boosted_rounds()
    return trees


@pytest.mark.parametrize(
    "twice",
    [
        pytest.param(twice_lightgbm, marks=needs("lightgbm"), id="lightgbm"),
        pytest.param(twice_xgboost, marks=needs("xgboost"), id="xgboost"),
    ],
)
def test_two_trainings_of_a_run_need_names(tmp_path: Path, twice: Callable[..., int]) -> None:
    config = config_in(tmp_path)
    with pytest.raises(FitError, match=r'two trainings of one run[\s\S]*pass name="\.\.\."'):
        quiet(twice, config, start="inline")

    def named(config: Any, ctx: Any) -> int:
        return twice(config, ctx, ("first", "second"))

    assert quiet(named, config, start="inline").value == 6


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(nbb.lightgbm, marks=needs("lightgbm"), id="lightgbm"),
        pytest.param(nbb.xgboost, marks=needs("xgboost"), id="xgboost"),
    ],
)
def test_a_report_every_zero_rounds_is_refused(tmp_path: Path, make: Callable[..., Any]) -> None:
    with pytest.raises(FitError, match=r"every=0 is no number of rounds"):
        quiet(lambda config, ctx: make(ctx, {}, every=0), config_in(tmp_path), start="inline")
