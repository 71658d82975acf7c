"""The table of a space: its rows, and the YAML that it reads and writes."""

from __future__ import annotations

from typing import Any

import pytest
from harmless import EVIL, assert_harmless
from panels import visible

from nbtoolkit.config.loading import dump, parse_value
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError
from nbtoolkit.panel.form import FormState
from nbtoolkit.panel.setup import Setup
from nbtoolkit.panel.space_table import ParameterRow, SpaceTable, read_rows, write_rows

SPACE = """\
study: {metric: score}
budget: {n_trials: 4}
space:
  optim.lr: {type: float, low: 1e-4, high: 0.1, log: true}
  train.batch_size: {type: int, low: 16, high: 64, step: 16}
  optim.name: [adamw, sgd]
  optim.momentum: {type: float, low: 0.5, high: 0.9, when: {optim.name: sgd}}
  train.epochs: 5
"""

ROWS = [
    ParameterRow("optim.lr", "float", "0.0001", "0.1", True),
    ParameterRow("train.batch_size", "int", "16", "64", more={"step": 16}),
    ParameterRow("optim.name", "categorical", values="adamw, sgd"),
    ParameterRow("optim.momentum", "float", "0.5", "0.9", more={"when": {"optim.name": "sgd"}}),
    ParameterRow("train.epochs", "constant", values="5"),
]


def table_of(text: str) -> tuple[SpaceTable, list[str]]:
    """A table and the YAML texts that it writes."""
    written: list[str] = []
    table = SpaceTable(written.append)
    table.load(text)
    return table, written


def names(table: SpaceTable) -> list[str]:
    return [row.row.name for row in table.rows]


# --- YAML and rows ---


def test_a_space_is_read_as_rows_and_written_back_as_it_was() -> None:
    assert read_rows(SPACE) == (ROWS, [])
    assert parse_value(write_rows(SPACE, ROWS)) == parse_value(SPACE)
    bare = dump(parse_value(SPACE)["space"])
    assert read_rows(bare) == (ROWS, [])
    assert parse_value(write_rows(bare, ROWS)) == parse_value(bare)


def test_only_what_was_changed_is_written_differently() -> None:
    rows = [ParameterRow("optim.lr", "float", "1e-5", "0,1"), *ROWS[1:4]]
    written: Any = parse_value(write_rows(SPACE, rows))
    before: Any = parse_value(SPACE)
    assert written["study"] == before["study"]
    # A text that is no number stays as it was typed: the error beside the space quotes it.
    assert written["space"].pop("optim.lr") == {"type": "float", "low": 1e-5, "high": "0,1"}
    for name in ("optim.lr", "train.epochs"):
        before["space"].pop(name)
    assert written["space"] == before["space"]


@pytest.mark.parametrize(
    "choices",
    [["a, b", "c"], [None, True, 1.5, "null"], [[1, 2], [3]], [{"a": 1}], ["日本", EVIL], [1]],
)
def test_choices_of_every_kind_are_read_as_they_were_written(choices: list[Any]) -> None:
    text = dump({"model.kind": choices})
    [row], _ = read_rows(text)
    assert "\n" not in row.values
    assert row.spec() == {"type": "categorical", "choices": choices}


@pytest.mark.parametrize("value", [5, "null", None, True, {"a": [1, {"b": 2}]}, "a: b", 1e-9, EVIL])
def test_constants_of_every_kind_are_read_as_they_were_written(value: Any) -> None:
    written = {"type": "constant", "value": value}
    [row], _ = read_rows(dump({"model.kind": written}))
    assert "\n" not in row.values
    assert row.spec() == written


def test_what_a_row_cannot_hold_stays_in_the_yaml() -> None:
    text = "a: {type: normal}\nb: {nested: 1}\nc: [1, 2]\nd: {type: float, log: [1]}\n"
    text += f"e: {{type: int, low: 0x{'f' * 5000}}}\n"
    rows, without = read_rows(text)
    assert [row.name for row in rows] == ["c"]
    assert without == ["a", "b", "d", "e"]
    small = text.partition("e: {")[0]
    written: Any = parse_value(write_rows(small, [ParameterRow("c", "categorical", values="3")]))
    assert written == {**parse_value(small), "c": {"type": "categorical", "choices": [3]}}


def test_an_empty_space_has_no_rows_and_rows_without_a_name_are_not_written() -> None:
    assert read_rows("") == read_rows("# a comment") == read_rows("space:") == ([], [])
    assert write_rows("", []) == write_rows("", [ParameterRow("")]) == ""
    assert (
        write_rows("", [ParameterRow("a", "int", "1", "2")])
        == "a:\n  type: int\n  low: 1\n  high: 2\n"
    )
    assert parse_value(
        write_rows("budget: {n_trials: 3}", [ParameterRow("a", "constant", values="1")])
    ) == {
        "budget": {"n_trials": 3},
        "space": {"a": {"type": "constant", "value": 1}},
    }
    for text in ("[", "3", "[1]", "a: &a [*a"):
        with pytest.raises(ConfigError, match="space:1"):
            read_rows(text)


def test_a_name_that_is_half_typed_does_not_become_a_section() -> None:
    table, written = table_of("a: [1, 2]\n")
    table.add.click()
    for name in ("s", "study", "study.x"):
        table.rows[1].inputs["name"].value = name
    table.rows[1].inputs["kind"].value = "constant"
    assert parse_value(written[-1]) == {"a": [1, 2], "study.x": {"type": "constant", "value": None}}


# --- widgets ---


def test_the_table_shows_the_rows_and_says_what_only_the_yaml_has() -> None:
    table, written = table_of(SPACE)
    assert [widgets.row for widgets in table.rows] == ROWS
    assert "train.batch_size (step), optim.momentum (when)" in table._note.value
    assert written == []
    shown = [
        [key for key, widget in widgets.inputs.items() if visible(widget)] for widgets in table.rows
    ]
    assert shown[0] == ["name", "kind", "low", "high", "log"]
    assert shown[2] == shown[4] == ["name", "kind", "values"]


def test_an_edit_in_the_table_writes_yaml_and_changes_nothing_that_is_typed() -> None:
    table, written = table_of("optim.lr: {type: float, low: 0.1, high: 0.2}")
    low = table.rows[0].inputs["low"]
    for text in ("", "1", "1e", "1e-", "1e-3"):
        low.value = text
        table.load(written[-1])  # the YAML field gives it back
        assert low.value == text
    assert parse_value(written[-1]) == {"optim.lr": {"type": "float", "low": 1e-3, "high": 0.2}}
    table.rows[0].inputs["kind"].value = "categorical"
    table.rows[0].inputs["values"].value = "1e-3, 1e-2"
    assert not visible(table.rows[0].inputs["low"])
    assert parse_value(written[-1]) == {
        "optim.lr": {"type": "categorical", "choices": [1e-3, 1e-2]}
    }


def test_rows_are_added_and_removed() -> None:
    table, written = table_of("a: [1, 2]\nb: [3, 4]\nc: [5, 6]\n")
    boxes = table._body.children
    boxes[1].children[-1].click()
    assert names(table) == ["a", "c"]
    assert parse_value(written[-1]) == {"a": [1, 2], "c": [5, 6]}
    table.add.click()
    assert names(table) == ["a", "c", ""]
    assert len(written) == 1  # it has no name yet
    assert len(table.made) == 3  # the removed row's widgets are used again
    table.rows[2].inputs["name"].value = " model.x "
    assert parse_value(written[-1])["model.x"] == {"type": "float"}
    for _ in range(3):
        table._body.children[0].children[-1].click()
    assert written[-1] == ""


def test_while_the_yaml_is_wrong_the_table_is_empty_and_changes_nothing() -> None:
    table, written = table_of(SPACE)
    table.load("optim.lr: [")
    assert table._body.children == ()
    assert table.add.disabled
    assert "appears when the YAML below is right" in table._note.value
    table.load("optim.lr: [1, 2]")
    assert names(table) == ["optim.lr"]
    assert not table.add.disabled
    assert table._note.value == ""
    assert written == []


def test_names_of_any_kind_are_text() -> None:
    table, _ = table_of(dump({EVIL: {"type": EVIL}, "b": {"type": "int", EVIL: 1}}))
    assert EVIL[:8] not in table._note.value
    assert_harmless(table._note.value)


def test_settings_and_the_own_sections_are_suggested() -> None:
    state = FormState(Config().with_overrides({"model": {"hidden": 64}}), "optim.lr: [1, 2]")
    setup = Setup(state, lambda: None)
    setup.build()
    setup.show(state.validate())
    setup.table.add.click()
    for row in setup.table.rows:
        options = row.inputs["name"].options
        assert options[0] == "model.hidden"
        assert {"optim.lr", "train.batch_size"} <= set(options)
        assert "runtime.output_dir" not in options


# --- both ways in step ---


def test_table_and_yaml_follow_each_other() -> None:
    edits: list[None] = []
    setup = Setup(FormState(Config(), SPACE), lambda: edits.append(None))
    setup.build()
    count = len(edits)
    setup.table.rows[0].inputs["high"].value = "0.5"
    assert len(edits) == count + 1
    assert parse_value(setup.space.value)["space"]["optim.lr"]["high"] == 0.5
    assert setup.state.space == setup.space.value
    sweep_config = setup.state.validate().sweep_config
    assert sweep_config is not None
    assert sweep_config.space["optim.lr"]["high"] == 0.5
    setup.space.value = "optim.lr: [1, 2, 3]"
    assert [row.row for row in setup.table.rows] == [
        ParameterRow("optim.lr", "categorical", values="1, 2, 3")
    ]
    setup.table.rows[0].inputs["values"].value = "1, 2, ["
    validation = setup.state.validate()
    assert "choices" in validation.space_error
    setup.load(FormState(Config()))
    assert setup.table.rows == []
    assert setup.space.value == setup.state.space == ""
