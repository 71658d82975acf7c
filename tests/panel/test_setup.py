"""The form and its widgets: what is typed, what is wrong, what it costs, and what is kept."""

from __future__ import annotations

import itertools
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from harmless import EVIL, assert_harmless
from panels import models, visible
from traitlets import TraitError

import nbtoolkit as nb
from nbtoolkit.config.loading import parse_value
from nbtoolkit.config.schema import Config
from nbtoolkit.panel.form import (
    EDITS_FILE,
    FormState,
    Validation,
    config_fields,
    kept_edits,
    text_of,
    texts_of,
)
from nbtoolkit.panel.setup import Setup, cost_text

FIELDS = config_fields()
SPACE = "optim.lr: {type: float, low: 0.01, high: 0.1}"

# What people and pastes leave in a field. Most are wrong for most fields, none may break the form.
TYPED = [
    *("[{", "null", "true", "-1", "0", "1.5", ".nan", ".inf", "1e400", "a text", "2h", "-2h"),
    *("[1]", "{a: 1}", "", "   ", "2020-01-01", '"\\0"', "a: b: c", "{1: 2}", "日本", "@", "\x07"),
    *("9" * 5000, "&a {b: *a}", "!!int x", "!!timestamp x", "!!python/name:os.system", "0x" * 9),
    EVIL,
]

SPACES = [
    *("[", "[" * 500, "3", "1: 2", "study: 3", "space: null", "optim.lr: null", "optim.lr: [[1]]"),
    *("optim: 3", "&a {b: *a}", "optim.lr: &a [*a]", "a" * 10_000, "? [a]\n: b"),
    *("!!python/name:os.system", f"optim.lr: {{type: int, low: {'9' * 5000}}}"),
    *(
        f"optim.lr: {{{EVIL!r}: 1}}",
        f"{EVIL!r}: [1]",
        "space: {type: {}}",
        "optim.lr: [!!binary x]",
    ),
    *(f"optim.lr: {{type: int, low: 0x{'f' * 5000}}}", "space: []", "optim.lr: {type: []}"),
]


def setup_of(space: str = "", **overrides: Any) -> Setup:
    return built(Setup(FormState(Config().with_overrides(overrides), space), lambda: None))


def built(setup: Setup) -> Setup:
    setup.build()
    return setup


def shown(setup: Setup) -> list[str]:
    return [name for name in FIELDS if setup._is_shown(name)]


def checked(setup: Setup) -> Validation:
    """Validate what stands in the form and show it, as the panel does."""
    validation = setup.state.validate()
    setup.show(validation)
    return validation


# --- the form without widgets ---


def test_every_setting_has_its_documentation_and_allowed_values() -> None:
    values = nb.load_config(env=None).to_dict()
    names = {"task", "seed", "model", "data"}
    sections = ("optim", "train", "distributed", "checkpoint", "tracking", "runtime", "cluster")
    for section in sections:
        names |= {f"{section}.{key}" for key in values[section]}
    assert set(FIELDS) == names
    for field in FIELDS.values():
        assert field.help
        assert field.allowed in field.tooltip
    assert FIELDS["train.precision"].choices == ("auto", "fp32", "fp16", "bf16")
    assert FIELDS["distributed.enabled"].choices == ("auto", "true", "false")
    assert FIELDS["train.max_steps"].allowed.endswith(", or empty")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("optim.lr", "0,01", "Must be a number above 0, e.g. 0.01 (decimal point)"),
        ("optim.lr", "-3", "Must be a number above 0, e.g. 0.001"),
        ("optim.lr", "ten", "Must be a number above 0, e.g. 0.001"),
        ("train.epochs", "1,5", "Must be a whole number of at least 1, e.g. 10"),
        ("train.max_steps", "0", "Must be a whole number of at least 1, or empty"),
        ("distributed.world_size", "0", "Must be auto, or a whole number of at least 1"),
        ("model", "3", "model:1: not a mapping of settings"),
        ("model", "a: 1\nb: [", "model:2: not valid YAML"),
    ],
)
def test_a_wrong_text_says_what_it_must_be(name: str, text: str, error: str) -> None:
    told = FIELDS[name].error(text)
    assert told == error or (name == "model" and told.startswith(error))
    assert FIELDS[name].error(FormState(Config()).texts[name]) == ""


@pytest.mark.long
def test_whatever_is_typed_into_any_field_is_accepted_or_reported_beside_it() -> None:
    """Accepted is what the configuration itself accepts; nobody can type into a list."""
    for name, text in itertools.product(FIELDS, TYPED):
        if FIELDS[name].choices and text not in ("[{", "a text"):
            continue
        form = FormState(Config())
        form.texts[name] = text
        validation = form.validate()
        assert set(validation.errors) <= {name}, text
        told = bool(validation.errors or validation.together)
        assert (validation.config is None, told) == (not _accepted(name, text),) * 2, (name, text)


def _accepted(name: str, text: str) -> bool:
    try:
        value = parse_value(text)
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            return False  # as in a file
        free = FIELDS[name].free and value is None  # an empty section
        Config().with_overrides({name: {} if free else value})
    except Exception:  # of whatever kind: it is not accepted
        return False
    return True


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, 1e-5, 3e-4, 1e300, "adamw", "null", "1e-3", "a: b", 'q"q', "", [0, 2]),
        *("日本", ["a, b", "[", 'say "x", y', None, [1, 2], {"a": 1}], "{a", 'a, "b": c', "\\"),
        "two\nlines",
    ],
)
def test_a_text_is_read_as_the_value_it_was_made_of(value: Any) -> None:
    assert parse_value(text_of(value)) == value


def test_a_form_makes_the_configuration_it_came_from() -> None:
    model = {"kind": "cnn", "deep": {"a": [1, 2]}}
    optim = {"lr": 3e-4, "options": {"betas": [0.9, 0.99]}}
    others = {"train.batch_size_per_device": 4, "runtime.output_dir": EVIL}
    config = nb.load_config(overrides={"model": model, "optim": optim, **others})
    assert FormState(config).validate().config == config
    assert texts_of(config)["optim.lr"] == "0.0003"


def test_whatever_is_typed_as_a_space_is_reported_and_breaks_no_table() -> None:
    setup = setup_of()
    for text, trials in itertools.product(SPACES, ("", "0", "-1", "1.5", "²", "9" * 5000)):
        setup.space.value, setup.trials.value = text, trials
        validation = checked(setup)
        assert validation.config is not None
        assert validation.sweep_config is None
        assert validation.space_error, text[:40]
        assert_harmless(setup.space_error.value)


@pytest.mark.parametrize(
    ("space", "trials", "error"),
    [
        ("a: [", "", "space:1: not valid YAML"),
        ("a: 1\nb: {type float", "", "space:2: not valid YAML"),
        ("[1]", "", "not a mapping"),
        ("optim.rl: [1, 2]", "3", "did you mean"),
        (SPACE, "lots", "Number of trials must be a whole number from 1 to 999999999"),
        (SPACE, "0", "Number of trials must be a whole number"),
    ],
)
def test_a_wrong_space_is_reported_and_the_configuration_is_right(
    space: str, trials: str, error: str
) -> None:
    form = FormState(Config(), space)
    form.trials = trials
    validation = form.validate()
    assert error in validation.space_error
    assert validation.config is not None
    assert validation.sweep_config is None


# --- widgets ---


def test_common_and_changed_settings_come_first_and_others_are_found() -> None:
    setup = setup_of(**{"tracking.mlflow": False})
    common = {"train.epochs", "train.batch_size", "optim.lr", "model", "seed"}
    assert set(shown(setup)) == common | {"distributed.world_size", "tracking.mlflow"}
    assert len(setup.rows) == 7  # others are made when they are first shown
    assert "task" in shown(built(Setup(FormState(Config()), lambda: None, task=True)))
    setup.search.value = "decay"
    assert "optim.weight_decay" in shown(setup)
    assert "train.ema_decay" in shown(setup)
    setup.search.value = "half precision"  # words of the documentation
    assert shown(setup) == ["train.fp16_weights"]
    setup.search.value = "e"
    assert len(shown(setup)) == 15
    assert "settings found" in setup._matches.value
    setup.search.value = "no such setting"
    assert shown(setup) == []
    setup.section.value = "checkpoint"
    assert setup.search.value == ""
    assert shown(setup) == [name for name in FIELDS if name.startswith("checkpoint.")]
    setup.section.value = "all"
    assert len(shown(setup)) == len(setup.rows) == len(FIELDS)


def test_every_field_has_a_label_and_its_documentation() -> None:
    setup = setup_of()
    for name, field in FIELDS.items():
        widget = setup.input(name)
        assert widget.description == name
        assert field.help in widget.tooltip
        assert field.allowed in widget.tooltip


def test_a_wrong_value_in_any_field_is_shown_beside_it() -> None:
    setup = setup_of(SPACE)
    setup.trials.value = "3"
    for name, field in FIELDS.items():
        widget = setup.input(name)
        if field.choices:
            with pytest.raises(TraitError):
                widget.value = "another"
            continue
        right = widget.value
        for text in ("[{", next(t for t in TYPED[1:] if len(t) < 50 and not _accepted(name, t))):
            if name.endswith("_dir") and text == "[{":
                continue
            widget.value = text
            validation = checked(setup)
            error = setup.errors[name].value + setup.together.value
            assert 'role="alert"' in error, (name, text)
            assert_harmless(setup.errors[name].value)
            assert validation.config is None
            assert len(validation.mistakes) == 1
            widget.value = right
            validation = checked(setup)
            assert setup.errors[name].value == setup.together.value == ""
            assert validation.sweep_config is not None
            assert len(validation.mistakes) == 0


def test_an_error_in_a_field_that_is_not_shown_is_shown_above_all() -> None:
    setup = setup_of()
    setup.input("optim.momentum").value = "0,5"
    checked(setup)
    assert setup.together.value == ""
    setup.section.value = "train"
    checked(setup)
    assert "optim.momentum: Must be a number from 0 to 1, e.g. 0.5" in setup.together.value
    setup.open_at("optim.momentum")
    checked(setup)
    assert setup.together.value == ""
    assert "Must be" in setup.errors["optim.momentum"].value


def test_settings_that_contradict_each_other_are_shown_above_all() -> None:
    setup = setup_of()
    setup.input("runtime.hang_timeout").value = "2h"
    assert len(checked(setup).mistakes) == 1
    assert "is not above hang_timeout" in setup.together.value
    setup.input("distributed.timeout").value = "3h"
    assert len(checked(setup).mistakes) == 0
    assert setup.together.value == ""


def test_a_changed_value_is_bold_and_can_be_reset() -> None:
    setup = setup_of(**{"optim.lr": 0.5, "train.max_steps": 7, "tracking.tensorboard": True})
    for name, default in {
        "optim.lr": "0.001",
        "train.max_steps": "",
        "tracking.tensorboard": "false",
    }.items():
        widget = setup.input(name)
        reset = setup._resets[name]
        assert widget.description == f"<b>{name}</b>"
        assert visible(reset)
        reset.click()
        assert widget.value == default
        assert widget.description == name
        assert not visible(reset)
        assert name in shown(setup)  # a row does not leave under the mouse
    assert setup.state.changed() == []
    assert setup.edited


def test_booleans_are_lists_and_null_is_an_empty_field() -> None:
    setup = setup_of()
    choice = setup.input("tracking.mlflow")
    assert (choice.value, choice.options) == ("true", ("true", "false"))
    choice.value = "false"
    assert setup.state.texts["tracking.mlflow"] == "false"
    steps = setup.input("train.max_steps")
    assert (steps.value, steps.placeholder) == ("", "default")
    steps.value = "20"
    assert setup.state.texts["train.max_steps"] == "20"
    steps.value = " "
    assert setup.state.texts["train.max_steps"] == "null"
    uri = setup.input("tracking.uri")
    for text in ("n", "nu", "nul", "null", "null.db"):
        uri.value = text  # as it is typed, key by key
        assert uri.value == text
    assert setup.state.texts["tracking.uri"] == "null.db"


def test_load_replaces_the_contents_and_is_no_edit() -> None:
    edits: list[None] = []
    setup = built(Setup(FormState(Config()), lambda: edits.append(None)))
    setup.input("optim.lr").value = "0.25"
    assert setup.edited
    setup.edited = False
    other = FormState(Config().with_overrides({"optim.lr": 0.5, "train.swa_lr": 0.1}), SPACE)
    other.trials = "9"
    setup.section.value = "common and changed"
    setup.load(other)
    assert setup.state is other
    assert not setup.edited
    assert {"optim.lr", "train.swa_lr"} <= set(shown(setup))
    assert setup.input("optim.lr").value == "0.5"
    assert (setup.space.value, setup.trials.value) == (SPACE, "9")
    assert [row.row.name for row in setup.table.rows] == ["optim.lr"]
    count = len(edits)
    setup.input("optim.lr").value = "0.1"
    assert len(edits) == count + 1
    assert other.texts["optim.lr"] == "0.1"


def test_rows_may_be_made_while_another_thread_shows_errors() -> None:
    """Rows are made in the kernel's thread, errors are shown in the panel's."""
    setup = setup_of()
    made: list[bool] = []

    def make(_: Any) -> None:
        thread = threading.Thread(target=lambda: setup.input("optim.momentum"))
        thread.start()
        thread.join(30)
        made.append(not thread.is_alive())

    setup.errors["train.epochs"].observe(make, "value")  # in the middle of showing them
    setup.input("train.epochs").value = "many"
    checked(setup)
    assert made == [True]
    assert "Must be" in setup.errors["train.epochs"].value
    assert setup.errors["optim.momentum"].value == ""


def test_widgets_are_made_when_they_are_needed_and_all_are_closed() -> None:
    """ipywidgets keeps all that were made."""
    before = models()
    setup = Setup(FormState(Config(), "a: [1, 2]\nb: [1, 2]"), lambda: None)
    checked(setup)
    other = FormState(Config(), SPACE)
    setup.load(other)
    assert len(models() - before) == 1
    setup.build()
    assert (setup.state, setup.space.value) == (other, SPACE)
    setup.section.value = "all"
    assert len(models() - before) > 3 * len(FIELDS)
    setup.close()
    assert models() <= before


# --- what it costs ---


def sweep(trials: int, **more: Any) -> Validation:
    form = FormState(Config(), json.dumps({"space": {"optim.lr": [0.1, 0.2]}, **more}))
    form.trials = str(trials)
    validation = form.validate()
    assert validation.sweep_config is not None, validation.space_error
    return validation


def test_the_cost_is_trials_by_folds_by_the_pace_of_the_newest_run() -> None:
    assert cost_text(sweep(20), 12.0, 2) == "20 trials, about 2 min on 2 slots"
    folds = sweep(20, folds={"k": 3})
    told = "20 trials x 3 folds = 60 trainings, about 9 min on 2 slots"
    assert cost_text(folds, 18.0, 2) == cost_text(sweep(20), 18.0, 2, folds=3) == told
    assert cost_text(folds) == "20 trials x 3 folds = 60 trainings"
    assert cost_text(sweep(1), 4.2) == "1 trial, about 4 s on 1 slot"
    assert cost_text(sweep(500), 60.0, 3) == "500 trials, about 2 h 47 min on 3 slots"
    alone = FormState(Config()).validate()
    assert cost_text(alone, 5.0) == ""
    assert cost_text(alone, 5.0, folds=5) == "5 folds = 5 trainings, about 25 s on 1 slot"
    endless = FormState(Config(), "budget: {timeout: 1h}\nspace: {optim.lr: [0.1, 0.2]}").validate()
    assert endless.sweep_config is not None
    assert cost_text(endless, 1.0) == ""  # the number of trials is unknown
    setup = setup_of()
    setup.show(alone, "20 trials & more")
    assert "20 trials &amp; more" in setup.cost.value


# --- edits that survive the kernel ---


def test_edits_are_kept_for_the_next_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    setup = setup_of()
    setup.keep(folder)
    assert not folder.exists()  # nothing was typed
    setup.input("optim.lr").value = "0,01"  # also what is wrong
    setup.space.value, setup.trials.value = SPACE, "7"
    setup.keep(folder)
    file = folder / EDITS_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = kept_edits(folder)
    assert kept is not None
    assert kept[0] == setup.state
    later = setup_of()
    later.load(kept[0])
    assert later.input("optim.lr").value == "0,01"
    assert (later.state.space, later.state.trials) == (SPACE, "7")


def test_edits_are_written_at_most_once_a_second(tmp_path: Path) -> None:
    setup = setup_of()
    for rate in ("0.1", "0.2"):
        setup.input("optim.lr").value = rate
        setup.keep(tmp_path)
    assert setup.edited  # the next call writes them
    assert json.loads((tmp_path / EDITS_FILE).read_text())["texts"] == {"optim.lr": "0.1"}
    os.utime(tmp_path / EDITS_FILE, (0, 0))
    setup.keep(tmp_path)
    assert not setup.edited
    assert json.loads((tmp_path / EDITS_FILE).read_text())["texts"] == {"optim.lr": "0.2"}
    assert [file.name for file in tmp_path.iterdir()] == [EDITS_FILE]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"\xff", b'{"texts": {}, "space": ""}', b"[" * 100_000, b"null"),
        b'{"texts": 3, "space": "", "trials": ""}',
        b'{"texts": [1], "space": "", "trials": ""}',
    ],
)
def test_a_damaged_file_offers_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / EDITS_FILE).write_bytes(content)
    assert kept_edits(tmp_path) is None


def test_foreign_names_and_values_of_no_list_are_left_out(tmp_path: Path) -> None:
    texts = {"optim.lrr": "1", "optim.lr": 3, "train.precision": "fp8", "seed": EVIL}
    contents = {"texts": texts, "space": EVIL, "trials": "x"}
    (tmp_path / EDITS_FILE).write_text(json.dumps(contents))
    kept = kept_edits(tmp_path)
    assert kept is not None
    assert kept[0].changed() == ["seed"]
    setup = setup_of()
    setup.section.value = "all"
    setup.load(kept[0])
    checked(setup)
    assert setup.input("seed").value == setup.space.value == EVIL
    assert_harmless(setup.errors["seed"].value)


def test_a_folder_that_cannot_be_written_costs_the_edits_alone() -> None:
    setup = setup_of()
    setup.input("seed").value = "3"
    setup.keep("/sys/out")
    assert kept_edits("/sys/out") is kept_edits("~nobody-of-this-name") is None
    assert setup.state.texts["seed"] == "3"
