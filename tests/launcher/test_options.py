"""The options are written once, and help, editors and type checkers see them."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jedi
import pytest

import nbtoolkit as nb
from nbtoolkit.launcher.options import LaunchOptions, SharedOptions

SHARED = ["wait", "where", "name", "resume", "detach", "display", "on_event"]
TAKES: dict[Callable[..., Any], list[str]] = {
    nb.launch: ["train", "config", "processes", "start", *SHARED],
    nb.cross_validate: ["train", "config", "folds", "processes", *SHARED],
    nb.sweep: [
        *("train", "config", "space", "n_trials", "timeout", "folds", "targets", "groups"),
        *SHARED,
    ],
}


@pytest.mark.parametrize("call", TAKES)
def test_the_signature_shows_all_options_with_their_defaults(call: Callable[..., Any]) -> None:
    shown = inspect.signature(call).parameters
    assert list(shown) == TAKES[call]
    defaults = {field.name: field.default for field in fields(LaunchOptions)}
    for name in set(shown) & set(defaults):
        assert shown[name].default == defaults[name]
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("call", TAKES)
def test_the_docstring_explains_every_argument(call: Callable[..., Any]) -> None:
    explained = inspect.getdoc(call) or ""
    assert [name for name in TAKES[call] if f"\n    {name}: " not in explained] == []


def test_type_checkers_see_the_options_of_the_dataclass() -> None:
    hints = typing.get_type_hints(LaunchOptions)
    for name in ("processes", "start", "wait"):  # the functions name these themselves
        del hints[name]
    assert typing.get_type_hints(SharedOptions) == hints


def test_a_kernel_completes_an_option() -> None:
    completions = jedi.Interpreter("nb.launch(train, config, de", [{"nb": nb}]).complete()
    assert "detach=" in [each.name for each in completions]


def test_the_body_of_launch_fits_on_a_screen() -> None:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(nb.launch)))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    docstring = function.body[0]
    assert len(source.splitlines()) - (docstring.end_lineno or 0) <= 40
