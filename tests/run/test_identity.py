"""What counts as the code of a training function, and which changes of it make another run."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbtoolkit.run.identity import Identity, changed_functions, code_of, function_name

CELLS = """
import functools, json

class Base:
    rate = 1

class Net(Base):
    def forward(self, x):
        return scaled(x)

    @property
    def size(self):
        return 3

    @staticmethod
    def loss(x):
        return x - 1

def scaled(x):
    return x * 2

def unused(x):
    return x

def again(n):
    return again(n - 1) if n else scaled(n)

def train(config, ctx):
    def inner():
        return Net().forward(again(1))
    return {"loss": inner(), "text": json.dumps(functools.reduce(max, [1]))}
"""


def cells(*changes: tuple[str, str]) -> Callable[..., Any]:
    """``train`` of a notebook whose cells have these changes."""
    text = CELLS
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)
    train: Callable[..., Any] = names["train"]
    return train


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("x * 2", "x * 3"), id="a function that a method calls"),
        pytest.param(("scaled(n)", "scaled(n + 1)"), id="a function that calls itself"),
        pytest.param(("return 3", "return 4"), id="a property"),
        pytest.param(("x - 1", "x - 2"), id="a static method"),
        pytest.param(("rate = 1", "rate = 2"), id="an attribute of a base class"),
        pytest.param(("rate = 1", "rate = 1\n    other = 2"), id="a new attribute"),
        pytest.param(("class Net(Base)", "class Net"), id="the base class"),
    ],
)
def test_code_that_is_called_counts(change: tuple[str, str]) -> None:
    assert Identity.of({}, cells(change)) != Identity.of({}, cells())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("def unused(x):\n    return x", "def unused(x):\n    return 7"), id="unused"),
        pytest.param(
            ("import functools, json\n", "import functools, json\n\n\n"), id="lines above"
        ),
        pytest.param(("rate = 1", '"""Of all."""\n    rate = 1'), id="the docstring of a class"),
    ],
)
def test_other_code_does_not_count(change: tuple[str, str]) -> None:
    assert Identity.of({}, cells(change)) == Identity.of({}, cells()) == Identity.of({}, cells())


def make(called: object) -> Callable[..., Any]:
    def train(config: Any, ctx: Any) -> object:
        return called

    return train


def test_functions_in_closures_and_partials_count() -> None:
    one, other = cells(), cells(("x * 2", "x * 3"))
    assert Identity.of({}, make(one)) == Identity.of({}, make(cells()))
    assert Identity.of({}, make(one)) != Identity.of({}, make(other))
    partials = [functools.partial(make, called=train) for train in (one, cells(), other)]
    hashes = [Identity.of({}, partial) for partial in partials]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_installed_function_of_a_partial_counts() -> None:
    mean, median, again = (functools.partial(f, axis=0) for f in (np.mean, np.median, np.mean))
    hashes = [Identity.of({}, function).hash for function in (mean, again, median)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_installed_packages_and_objects_do_not_count() -> None:
    for called in (np.mean, np.ndarray, threading.Thread, types.SimpleNamespace(), None):
        assert Identity.of({}, make(called)) == Identity.of({}, make(threading.Lock()))


def test_names_of_functions_have_no_address() -> None:
    class Trains:
        def __call__(self, config: Any, ctx: Any) -> None: ...

    assert function_name(functools.partial(cells())) == "__main__.train"
    assert function_name(Trains()).endswith(".Trains")
    assert function_name(cells()) == "__main__.train"


def test_the_functions_that_differ_are_named() -> None:
    before, now = code_of(cells()), code_of(cells(("x * 2", "x * 3"), ("return 3", "return 4")))
    assert changed_functions(before, now) == "Net.size, scaled"
    assert changed_functions(before, before) == ""


def test_the_hash_shows_whether_only_the_code_differs() -> None:
    before = Identity.of({"optim": {"lr": 0.1}}, cells())
    other_code = Identity.of({"optim": {"lr": 0.1}, "task": 1}, cells(("x * 2", "x * 3")))
    other_settings = Identity.of({"optim": {"lr": 0.2}}, cells())
    assert len({before.hash, other_code.hash, other_settings.hash}) == 3
    assert other_code.hash_with(before.code) == before.hash
    assert other_settings.hash_with(before.code) != before.hash
