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


def space(written: list[str]) -> Any:
    """The space of the newest YAML."""
    document: Any = parse_value(written[-1])
    return document["space"]


def names(table: SpaceTable) -> list[str]:
    return [row.row.name for row in table.rows]


# --- YAML and rows ---


def test_a_space_is_read_as_rows_and_written_back_as_it_was() -> None:
    assert read_rows(SPACE) == (ROWS, [])
    assert parse_value(write_rows(SPACE, ROWS)) == parse_value(SPACE)


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
    text = dump({"space": {"model.kind": choices}})
    [row], _ = read_rows(text)
    assert "\n" not in row.values
    assert row.spec() == {"type": "categorical", "choices": choices}


@pytest.mark.parametrize("value", [5, "null", None, True, {"a": [1, {"b": 2}]}, "a: b", 1e-9, EVIL])
def test_constants_of_every_kind_are_read_as_they_were_written(value: Any) -> None:
    written = {"type": "constant", "value": value}
    [row], _ = read_rows(dump({"space": {"model.kind": written}}))
    assert "\n" not in row.values
    assert row.spec() == written


def test_what_a_row_cannot_hold_stays_in_the_yaml() -> None:
    text = "space:\n  a: {type: normal}\n  b: {nested: 1}\n  c: [1, 2]\n"
    text += "  d: {type: float, log: [1]}\n" + f"  e: {{type: int, low: 0x{'f' * 5000}}}\n"
    rows, without = read_rows(text)
    assert [row.name for row in rows] == ["c"]
    assert without == ["a", "b", "d", "e"]
    small = text.partition("  e: {")[0]
    written: Any = parse_value(write_rows(small, [ParameterRow("c", "categorical", values="3")]))
    before: Any = parse_value(small)
    assert written["space"] == {**before["space"], "c": {"type": "categorical", "choices": [3]}}


def test_other_sections_stay_as_they_were_typed() -> None:
    text = (
        "# mine\nstudy: {metric: a}  # best\nspace:\n  a: [1, 2]\n\nmodel:\n  # wide\n  hidden: 8\n"
    )
    written = write_rows(text, [ParameterRow("a", "constant", values="1")])
    assert written.startswith("# mine\nstudy: {metric: a}  # best\nmodel:\n  # wide\n  hidden: 8\n")
    assert "a:\n    type: constant\n    value: 1\n" in written


def test_an_empty_space_has_no_rows_and_rows_without_a_name_are_not_written() -> None:
    assert read_rows("") == read_rows("# a comment") == read_rows("space:") == ([], [])
    assert write_rows("", []) == write_rows("", [ParameterRow("")]) == ""
    assert (
        write_rows("", [ParameterRow("a", "int", "1", "2")])
        == "space:\n  a:\n    type: int\n    low: 1\n    high: 2\n"
    )
    assert parse_value(
        write_rows("budget: {n_trials: 3}", [ParameterRow("a", "constant", values="1")])
    ) == {
        "budget": {"n_trials": 3},
        "space": {"a": {"type": "constant", "value": 1}},
    }
    for text in ("[", "3", "[1]", "a: &a [*a"):
        with pytest.raises(ConfigError, match=r"settings\.yaml:1"):
            read_rows(text)


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
    table, written = table_of("space:\n  optim.lr: {type: float, low: 0.1, high: 0.2}")
    low = table.rows[0].inputs["low"]
    for text in ("", "1", "1e", "1e-", "1e-3"):
        low.value = text
        table.load(written[-1])  # the YAML field gives it back
        assert low.value == text
    assert space(written) == {"optim.lr": {"type": "float", "low": 1e-3, "high": 0.2}}
    table.rows[0].inputs["kind"].value = "categorical"
    table.rows[0].inputs["values"].value = "1e-3, 1e-2"
    assert not visible(table.rows[0].inputs["low"])
    assert space(written) == {"optim.lr": {"type": "categorical", "choices": [1e-3, 1e-2]}}


def test_rows_are_added_and_removed() -> None:
    table, written = table_of("space:\n  a: [1, 2]\n  b: [3, 4]\n  c: [5, 6]\n")
    boxes = table._body.children
    boxes[1].children[-1].click()
    assert names(table) == ["a", "c"]
    assert space(written) == {"a": [1, 2], "c": [5, 6]}
    table.add.click()
    assert names(table) == ["a", "c", ""]
    assert len(written) == 1  # it has no name yet
    assert len(table.made) == 3  # the removed row's widgets are used again
    table.rows[2].inputs["name"].value = " model.x "
    assert space(written)["model.x"] == {"type": "float"}
    for _ in range(3):
        table._body.children[0].children[-1].click()
    assert written[-1] == ""


def test_while_the_yaml_is_wrong_the_table_is_empty_and_changes_nothing() -> None:
    table, written = table_of(SPACE)
    table.load("optim.lr: [")
    assert table._body.children == ()
    assert table.add.disabled
    assert "appears when the YAML below is right" in table._note.value
    table.load("space: {optim.lr: [1, 2]}")
    assert names(table) == ["optim.lr"]
    assert not table.add.disabled
    assert table._note.value == ""
    assert written == []


def test_names_of_any_kind_are_text() -> None:
    table, _ = table_of(dump({"space": {EVIL: {"type": EVIL}, "b": {"type": "int", EVIL: 1}}}))
    assert EVIL[:8] not in table._note.value
    assert_harmless(table._note.value)


def test_settings_and_the_own_sections_are_suggested() -> None:
    config = Config().with_overrides({"model": {"hidden": 64}})
    setup = Setup(FormState(config, {"optim.lr": [1, 2]}), lambda: None)
    setup.show(setup.state.validate(), "", "")
    setup.table.add.click()
    for row in setup.table.rows:
        options = row.inputs["name"].options
        assert options[0] == "model.hidden"
        assert {"optim.lr", "train.batch_size"} <= set(options)
        assert "runtime.output_dir" not in options


# --- both ways in step ---


def test_table_and_yaml_follow_each_other() -> None:
    edits: list[None] = []
    form = FormState(Config(), parse_value(SPACE))  # type: ignore[arg-type]
    setup = Setup(form, lambda: edits.append(None))
    count = len(edits)
    setup.table.rows[0].inputs["high"].value = "0.5"
    assert len(edits) == count + 1
    assert setup.state.yaml == setup.yaml.value
    document: Any = parse_value(setup.yaml.value)
    assert document["space"]["optim.lr"]["high"] == 0.5
    setup.yaml.value = "space: {optim.lr: [1, 2, 3]}\nstudy: {metric: loss}"
    assert [row.row for row in setup.table.rows] == [
        ParameterRow("optim.lr", "categorical", values="1, 2, 3")
    ]
    setup.table.rows[0].inputs["values"].value = "1, 2, ["
    assert "choices" in setup.state.validate().errors["YAML"]
    setup.load(FormState(Config()))
    assert setup.table.rows == []
    assert setup.yaml.value == setup.state.yaml == ""
