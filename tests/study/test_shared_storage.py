"""What is checked of ``study.storage`` before a server is asked, and where its password is not."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import nbtoolkit as nb
from nbtoolkit import errors
from nbtoolkit.search.sweep import _search
from nbtoolkit.study.study_server import reason, split_storage
from nbtoolkit.study.sweep_config import SweepConfig, load_sweep_config

SPACE = {"optim.lr": [0.1, 0.2]}
URL = "postgresql://lab:hunter2@db.example:5432/studies"


def source(storage: str | None, **settings: Any) -> dict[str, Any]:
    study = {"metric": "val_loss", "storage": storage}
    return {"study": study, "budget": {"n_trials": 1}, "space": SPACE, **settings}


def loaded(storage: str | None, **settings: Any) -> SweepConfig:
    return load_sweep_config(source(storage, **settings), nb.load_config(env=None))


def test_a_password_is_in_the_url_and_not_in_the_settings() -> None:
    search = _search(loaded(URL), None)
    assert search.storage is not None
    assert search.storage.password == "hunter2"
    assert search.storage.drivername == "postgresql+psycopg"
    assert search.sweep_config is not None
    shown = "postgresql+psycopg://lab:***@db.example:5432/studies"
    assert search.sweep_config.study.storage == shown
    assert "hunter2" not in repr(search) + search.sweep_config.to_yaml() + repr(search.identity)
    assert _search(loaded(None), None).storage is None


def test_the_url_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUDY_URL", URL)
    kept, url = split_storage(loaded("$STUDY_URL"))
    assert url is not None
    assert (kept.study.storage, url.password) == ("$STUDY_URL", "hunter2")
    monkeypatch.delenv("STUDY_URL")
    with pytest.raises(errors.SpaceError, match="environment variable STUDY_URL is not set"):
        split_storage(loaded("$STUDY_URL"))


@pytest.mark.parametrize(
    ("storage", "text"),
    [
        ("mysql://lab:hunter2@db/studies", "a URL of mysql"),
        ("sqlite:////tmp/hunter2.db", "a URL of sqlite"),
        ("lab:hunter2@db", "no URL"),
        ("postgresql://lab:hunter2@db:port/studies", "no URL"),
        ("postgresql+psycopg2://lab:hunter2@db/studies", r"a URL of postgresql\+psycopg2"),
    ],
)
def test_what_is_no_server_is_refused_without_a_quotation(storage: str, text: str) -> None:
    with pytest.raises(errors.SpaceError, match=f"study.storage: {text}") as caught:
        split_storage(loaded(storage))
    assert "hunter2" not in str(caught.value)


def test_a_driver_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    config = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    with pytest.raises(
        errors.MissingExtra, match=r"pip install .*psycopg|\[postgresql\]"
    ) as caught:
        nb.sweep(print, config, source(URL), display="off")
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_call_that_goes_into_a_folder_has_no_password(tmp_path: Path) -> None:
    config = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    with pytest.raises(errors.SpaceError, match="writes the call into the run's folder") as caught:
        nb.sweep(print, config, source(URL), where="slurm", display="off")
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_leaders_of_a_shared_study_are_not_trained_again() -> None:
    with pytest.raises(errors.SpaceError, match="no machine knows alone"):
        loaded(URL, reevaluate_top={"k": 1})


def test_an_error_of_the_driver_does_not_quote_the_password() -> None:
    _, url = split_storage(loaded(URL))
    assert url is not None
    assert reason(ValueError(f"cannot use {URL}\nmore"), url) == (
        "cannot use postgresql://lab:***@db.example:5432/studies"
    )
    assert pickle.loads(pickle.dumps(url)) == url  # as it goes to the scheduler


@pytest.mark.parametrize("form", [dict, list])
def test_a_tracking_uri_with_a_password_is_refused(form: type) -> None:
    uri = "https://lab:hunter2@tracking.example"
    overrides: Any = {"tracking.uri": uri} if form is dict else [f"tracking.uri={uri}"]
    with pytest.raises(errors.ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        nb.load_config(overrides=overrides)
    assert "hunter2" not in str(caught.value)
