"""A failed run's exception shows the user's code, not nbtoolkit's."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

import nbtoolkit as nb
from nbtoolkit.attach import attach
from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import ConfigError, FitError

PACKAGE = str(Path(nb.__file__).parent)
SETTINGS = {"tracking.mlflow": False, "train.epochs": 1}
DATA = torch.arange(16.0).reshape(8, 2), torch.arange(8.0)


def misuses_fit(config, ctx):  # type: ignore[no-untyped-def]
    return nb.fit(ctx, config, torch.nn.Linear(2, 1), DATA, None, loss=torch.nn.functional.mse_loss)


def raises_in_its_loss(config, ctx):  # type: ignore[no-untyped-def]
    def loss(outputs, targets):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("of the user")

    return nb.fit(ctx, config, torch.nn.Linear(2, 1), DATA, None, loss=loss)


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
    assert "FitError: the loss compares each sample with all others" in summary
    assert "nbtoolkit.errors" not in summary
    assert "Do now" not in summary
    # The log has all of it.
    [folder] = [path for path in tmp_path.glob("*-misuses_fit-*") if path.is_dir()]
    log = attach(folder).paths.log(0).read_text()
    assert f'File "{PACKAGE}/training/loop.py"' in log


def test_an_error_of_the_users_keeps_the_frames_between_its_own(tmp_path: Path) -> None:
    files = raised_by(raises_in_its_loss, tmp_path, ZeroDivisionError)
    assert files[0] == files[-1] == __file__
    assert any(file.startswith(f"{PACKAGE}/training") for file in files)


def test_a_misspelt_setting_shows_one_error() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train\.epochs'") as caught:
        load_config(overrides={"train.epoch": 3})
    shown = "".join(traceback.format_exception(caught.value))
    assert "ValidationError" not in shown
