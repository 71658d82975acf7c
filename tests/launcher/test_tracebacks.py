"""A failed run's exception shows the user's code, not nbtoolkit's."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.attach import attach
from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import ConfigError, FitError
from nbtoolkit.wire.serialization import PackedError, pack_error, unpack_error

PACKAGE = str(Path(nb.__file__).parent)
SETTINGS = {"tracking.mlflow": False, "train.epochs": 1}
DATA = torch.arange(16.0).reshape(8, 2), torch.arange(8.0)


def misuses_fit(config, ctx):  # type: ignore[no-untyped-def]
    return nb.fit(ctx, config, torch.nn.Linear(2, 1), DATA, None, loss=torch.nn.functional.mse_loss)


def raises_in_its_loss(config, ctx):  # type: ignore[no-untyped-def]
    def loss(outputs, targets):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("of the user")

    return nb.fit(ctx, config, torch.nn.Linear(2, 1), DATA, None, loss=loss)


class Net(torch.nn.Module):
    """Needs three columns; DATA has two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 1))

    def forward(self, inputs):  # type: ignore[no-untyped-def]
        return self.layers(inputs)


def raises_in_torch(config, ctx):  # type: ignore[no-untyped-def]
    return nb.fit(ctx, config, Net(), DATA, None, loss=torch.nn.functional.mse_loss)


def raised_by(function: object, outputs: Path, kind: type[BaseException]) -> list[str]:
    """The files of the frames of what a launch raises, below the launch itself."""
    settings = {**SETTINGS, "runtime.output_dir": str(outputs)}
    with pytest.raises(kind) as caught:
        nb.launch(function, settings, processes=1)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    return files[files.index(__file__, 1) :]  # from the function of this file on


def test_an_error_of_ours_ends_at_the_users_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raised_by(misuses_fit, tmp_path, FitError) == [__file__]

    # The summary has what happened; the rest stands in the exception.
    [summary] = [line for line in capsys.readouterr().out.splitlines() if ": failed, " in line]
    assert "FitError: the loss compares each output with the targets of all samples" in summary
    assert "nbtoolkit.errors" not in summary
    assert "Do now" not in summary
    # The log has all of it.
    [folder] = [path for path in tmp_path.glob("*-misuses_fit-*") if path.is_dir()]
    log = attach(folder).paths.log(0).read_text()
    assert f'File "{PACKAGE}/training/fit.py"' in log


def test_an_error_below_fit_shows_the_users_frames_and_the_librarys_innermost_one(
    tmp_path: Path,
) -> None:
    assert raised_by(raises_in_its_loss, tmp_path, ZeroDivisionError) == [__file__] * 2
    files = raised_by(raises_in_torch, tmp_path, RuntimeError)
    assert files[:-1] == [__file__] * 2
    assert "torch/nn/modules/linear.py" in files[-1]


# --- rebuilt frames -------------------------------------------------------------------------------


def decorated(function: Callable[[], object]) -> Callable[[], object]:
    @functools.wraps(function)
    def inner() -> object:
        return function()

    return inner


@decorated
@decorated
def fails_in_a_long_statement() -> object:
    """Fail below the first line, in the middle of a statement."""
    values = {"a": 1}

    return [
        values["a"]
        + values[
            key  # of a multi-line expression
        ]
        for key in ("a", "b")
    ]


class Failing:
    """Fails in a method."""

    def method(self) -> object:
        """Fail in a generator that it reads."""
        return [*self.values()]

    def values(self) -> Iterator[int]:
        """Fail after the first value."""
        yield 1

        raise KeyError("b")


fails_in_a_lambda = lambda: (  # noqa: E731
    1,
    {}["b"],
)


@pytest.mark.parametrize(
    "fails",
    [fails_in_a_long_statement, Failing().method, fails_in_a_lambda],
    ids=["statement", "method", "lambda"],
)
def test_a_rebuilt_traceback_is_printed_like_the_first(fails: Callable[[], object]) -> None:
    with pytest.raises(KeyError) as caught:
        fails()
    error = caught.value
    rebuilt = unpack_error(PackedError.decode(pack_error(error).encode()))

    def printed(trace: object) -> str:
        return "".join(traceback.format_tb(trace))  # type: ignore[arg-type]

    assert printed(rebuilt.__traceback__) == printed(error.__traceback__)
    # What IPython 9.13 begins at.
    assert [*first_lines(rebuilt)] == [*first_lines(error)]


def first_lines(error: BaseException) -> Iterator[tuple[str, int]]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_code.co_name, frame.f_code.co_firstlineno


# --- errors in the kernel -------------------------------------------------------------------------


def test_a_misspelt_setting_shows_one_error() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train\.epochs'") as caught:
        load_config(overrides={"train.epoch": 3})
    shown = "".join(traceback.format_exception(caught.value))
    assert "ValidationError" not in shown
