"""The form and its widgets: what is typed, what is wrong, and what it costs."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from harmless import EVIL, assert_harmless
from panels import models

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.panel.cost import cost_text
from nbtoolkit.panel.form import FIELDS, FormState, Validation, replace_section, split_yaml
from nbtoolkit.panel.setup import Setup

SWEEP = {"study": {"metric": "loss"}, "space": {"optim.lr": [0.1, 0.2]}}

# What people and pastes leave in a field. Most are wrong for most fields, none may break the form.
TYPED = [
    *("[{", "null", "true", "-1", "0", "1.5", ".nan", ".inf", "1e400", "a text", "2h", "-2h"),
    *("[1]", "{a: 1}", "2020-01-01", '"\\0"', "a: b: c", "{1: 2}", "日本", "@", "\x07", "a=b"),
    *("9" * 5000, "&a {b: *a}", "!!int x", "!!timestamp x", "!!python/name:os.system", "0x" * 9),
    EVIL,
]

WRONG_YAML = [
    *("[", "[" * 500, "3", "1: 2", "study: 3", "trian: {}", "space: {optim.lr: null}"),
    *("space: {optim: 3}", "&a {b: *a}", "space: {optim.lr: &a [*a]}", "a" * 10_000),
    *("!!python/name:os.system", "? [a]\n: b", f"{EVIL!r}: [1]", "model: 3", "model: 1\nmodel: 2"),
    *("space: []", "space: {optim.lr: {type: []}}", "space: {optim.lr: [!!binary x]}", "\x00"),
    f"space: {{optim.lr: {{type: int, low: 0x{'f' * 5000}}}}}",
]


def form_of(sweep: Any = None, **overrides: Any) -> FormState:
    return FormState(Config().with_overrides(overrides), sweep)


def with_field(name: str, text: str, sweep: Any = None) -> Validation:
    form = form_of(sweep)
    form.texts[name] = text
    return form.validate()


# --- fields ---


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("optim.lr", "0,01", "write 0.01 (decimal point)"),
        ("optim.lr", "-3", "'-3' is not allowed"),
        ("optim.lr", "ten", "'ten' is not allowed"),
        ("train.epochs", "0", "is not allowed"),
        ("distributed.world_size", "0", "is not allowed"),
        ("budget.n_trials", "lots", "'lots' is not allowed"),
        ("budget.timeout", "soon", "is not allowed"),
    ],
)
def test_a_wrong_text_is_reported_beside_its_field(name: str, text: str, error: str) -> None:
    validation = with_field(name, text, SWEEP)
    assert list(validation.errors) == [name]
    assert error.replace("'-3'", "-3") in validation.errors[name]
    assert validation.config is None


def test_whatever_is_typed_into_any_field_is_accepted_or_reported_beside_it() -> None:
    for field, text in itertools.product(FIELDS, TYPED):
        validation = with_field(field.name, text, SWEEP)
        assert set(validation.errors) <= {field.name, "YAML"}, (field.name, text)
        told = bool(validation.errors)
        assert told == (validation.sweep_config is None), (field.name, text)


def test_every_field_sets_what_it_names() -> None:
    texts = {
        "train.epochs": "3", "train.batch_size": "64", "optim.lr": "1e-2",
        "train.precision": "bf16", "distributed.world_size": "2", "seed": "7",
        "budget.n_trials": "5", "budget.timeout": "2h",
        "study.sampler": "random", "study.pruner": "none",
    }  # fmt: skip
    form = form_of(SWEEP)
    form.texts = texts
    validation = form.validate()
    assert validation.errors == {}
    config, sweep = validation.config, validation.sweep_config
    assert config is not None
    assert sweep is not None
    assert (config.train.epochs, config.train.batch_size, config.optim.lr) == (3, 64, 0.01)
    assert (config.train.precision, config.distributed.world_size, config.seed) == ("bf16", 2, 7)
    assert (sweep.budget.n_trials, sweep.budget.timeout) == (5, 7200)
    assert (sweep.study.sampler, sweep.study.pruner) == ("random", "none")
    assert set(texts) == {field.name for field in FIELDS}


# --- YAML ---


@pytest.mark.parametrize("text", WRONG_YAML)
def test_wrong_yaml_is_an_error_that_harms_nothing(text: str) -> None:
    form = form_of()
    setup = Setup(form, lambda: None)
    setup.yaml.value = text
    validation = form.validate()
    assert list(validation.errors) == ["YAML"]
    assert validation.sweep_config is None
    setup.show(validation, "", "")
    assert_harmless(setup.errors["YAML"].value)


def test_errors_name_the_line_of_the_form() -> None:
    form = form_of()
    form.yaml = "model: {hidden: 8}\n\nstudy: {metric: loss}\ntrain:\n  epcohs: 3\n"
    assert "settings.yaml:5: unknown setting 'train.epcohs'" in form.validate().errors["YAML"]
    form.yaml = "model: {hidden: 8}\nspace:\n  # wide\n  optim.lr: {type: flaot, low: 1, high: 2}\n"
    form.yaml += "study: {metric: loss}\n"
    assert "settings.yaml:4: space.optim.lr" in form.validate().errors["YAML"]


def test_the_settings_of_a_run_and_of_a_sweep_are_split_by_their_lines() -> None:
    text = "# mine\nmodel:\n  a: 1\nspace:\n  x: [1]\n\ntracking: {mlflow: false}\nbudget: {}\n"
    run, sweep = split_yaml(text)
    assert run.split("\n") == [
        "# mine",
        "model:",
        "  a: 1",
        "",
        "",
        "",
        "tracking: {mlflow: false}",
        "",
        "",
    ]
    assert sweep.split("\n")[3:6] == ["space:", "  x: [1]", ""]
    assert split_yaml("model: {a: 1}")[1] == ""
    replaced = replace_section(text, "space", {"y": [2]})
    assert replaced.endswith("tracking: {mlflow: false}\nbudget: {}\nspace:\n  y:\n  - 2\n")
    assert "space" not in replace_section(text, "space", {})


def test_a_form_makes_the_configuration_it_came_from() -> None:
    model = {"kind": "cnn", "deep": {"a": [1, 2]}}
    optim = {"lr": 3e-4, "options": {"betas": [0.9, 0.99]}}
    others = {"train.batch_size_per_device": 4, "runtime.output_dir": EVIL, "train.max_steps": None}
    config = nb.load_config(overrides={"model": model, "optim": optim, **others})
    assert FormState(config).validate().config == config
    assert FormState(config).texts["optim.lr"] == "0.0003"


def test_a_bare_space_becomes_a_section_and_has_20_trials() -> None:
    form = form_of({"optim.lr": {"type": "float", "low": 0.01, "high": 0.1}})
    sweep = form.validate().sweep_config
    assert sweep is not None
    assert sweep.budget.n_trials == 20
    for own, trials in (("budget: {n_trials: 4}", 4), ("budget: {timeout: 60}", None)):
        form = form_of()
        form.yaml = f"{own}\nspace: {{optim.lr: [0.1, 0.2]}}\n"
        sweep = form.validate().sweep_config
        assert sweep is not None
        assert sweep.budget.n_trials == trials


def test_settings_that_contradict_each_other_are_an_error_of_the_yaml() -> None:
    form = form_of()
    form.yaml = "runtime: {hang_timeout: 2h}"
    assert "is not above hang_timeout" in form.validate().errors["YAML"]
    form.yaml += "\ndistributed: {timeout: 3h}"
    assert form.validate().errors == {}


# --- widgets ---


def test_load_replaces_the_contents_and_is_one_edit() -> None:
    edits: list[None] = []
    setup = Setup(form_of(), lambda: edits.append(None))
    other = form_of(SWEEP, **{"optim.lr": 0.5, "train.swa_lr": 0.1, "train.precision": "fp16"})
    count = len(edits)
    setup.load(other)
    assert len(edits) == count + 1
    assert setup.state is other
    assert setup.fields["optim.lr"].value == "0.5"
    assert setup.fields["train.precision"].value == "fp16"
    assert "swa_lr: 0.1" in setup.yaml.value
    assert [row.row.name for row in setup.table.rows] == ["optim.lr"]
    setup.fields["optim.lr"].value = "0.1"
    assert other.texts["optim.lr"] == "0.1"


def test_errors_may_be_shown_while_another_thread_types() -> None:
    setup = Setup(form_of(), lambda: None)
    typed: list[bool] = []

    def types(_: Any) -> None:
        thread = threading.Thread(target=lambda: setattr(setup.fields["seed"], "value", "3"))
        thread.start()
        thread.join(30)
        typed.append(not thread.is_alive())

    setup.errors["train.epochs"].observe(types, "value")  # in the middle of showing them
    setup.fields["train.epochs"].value = "many"
    setup.show(setup.state.validate(), "", "")
    assert typed == [True]
    assert "is not allowed" in setup.errors["train.epochs"].value
    assert setup.state.texts["seed"] == "3"


def test_a_form_has_few_widgets_and_all_are_closed() -> None:
    """ipywidgets keeps all that were made."""
    from nbtoolkit.panel.widgets import close_widget

    before = models()
    setup = Setup(form_of(SWEEP), lambda: None)
    assert len(models() - before) < 150
    setup.table.close()
    close_widget(setup.root)
    assert models() <= before


# --- what it costs ---


def sweep(trials: int, **more: Any) -> Validation:
    validation = form_of({**SWEEP, "budget": {"n_trials": trials}, **more}).validate()
    assert validation.sweep_config is not None, validation.errors
    return validation


def test_the_cost_is_trials_by_folds_by_the_pace_of_the_newest_run() -> None:
    assert cost_text(sweep(20), 12.0, 2) == "20 trials, about 2 min on 2 slots"
    folds = sweep(20, folds={"k": 3})
    told = "20 trials x 3 folds = 60 trainings, about 9 min on 2 slots"
    assert cost_text(folds, 18.0, 2) == cost_text(sweep(20), 18.0, 2, folds=3) == told
    assert cost_text(folds) == "20 trials x 3 folds = 60 trainings"
    assert cost_text(sweep(1), 4.2) == "1 trial, about 4 s on 1 slot"
    assert cost_text(sweep(500), 60.0, 3) == "500 trials, about 2 h 47 min on 3 slots"
    alone = form_of().validate()
    assert cost_text(alone, 5.0) == ""
    assert cost_text(alone, 5.0, folds=5) == "5 folds = 5 trainings, about 25 s on 1 slot"
    endless = form_of({**SWEEP, "budget": {"timeout": "1h"}}).validate()
    assert endless.sweep_config is not None
    assert cost_text(endless, 1.0) == ""  # the number of trials is unknown
