"""The table of docs/reference/commands.rst has a row for each command: its call, and its test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer.main
from whole import needs_extras

import nbtoolkit
from nbtoolkit.__main__ import command_line

pytestmark = needs_extras

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/reference/commands.rst").read_text()
ROWS = re.findall(r"(?m)^   ``([\w-]+)``, (?:``nb\.(\w+)``)?, ``(.+)::(.+)``$", TABLE)


def test_every_command_has_one_row() -> None:
    group = typer.main.get_command(command_line())
    commands = group.list_commands(group.make_context("nbtoolkit", [], resilient_parsing=True))
    assert sorted(command for command, *_ in ROWS) == sorted(commands)


@pytest.mark.parametrize(("command", "call", "file", "test"), ROWS)
def test_the_call_and_the_test_of_a_command_exist(
    command: str, call: str, file: str, test: str
) -> None:
    if call:
        assert callable(getattr(nbtoolkit, call))
    text = (ROOT / file).read_text()
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert test in functions
    assert f'"{command}"' in text
