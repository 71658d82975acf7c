"""The MLflow of the user: the tracking URI, the active run and the credentials of the kernel."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kernels import script
from mlflow.tracking import MlflowClient
from tracked_runs import Run, follow

import nbtoolkit as nb
from nbtoolkit.environment.kernel_mlflow import tracking_place, with_kernel_uri, with_password
from nbtoolkit.errors import ConfigError
from nbtoolkit.tracking.database import open_database

# MLflow 3.17 uses a loader that SQLAlchemy 2.1 means to drop; nothing we could do about it.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")


def configured(**tracking: object) -> nb.Config:
    return nb.load_config(env=None, overrides={"tracking": tracking})


@pytest.mark.parametrize(
    ("variable", "uri"),
    [
        ("https://mlflow.example.com/team", "https://mlflow.example.com/team"),
        ("https://ann:pa%40ss@example.com:5000", "https://ann@example.com:5000"),
        ("postgresql+psycopg://ann:pass@db/mlflow", "postgresql+psycopg://ann@db/mlflow"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
        ("sqlite:///runs.db", "sqlite:///{cwd}/runs.db"),
        ("sqlite:////data/runs.db", "sqlite:////data/runs.db"),
        ("mlruns", "file://{cwd}/mlruns"),
        ("file:mlruns", "file://{cwd}/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
    ],
)
def test_the_uri_of_the_environment_is_used_without_its_password_and_from_any_folder(
    variable: str, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    config = with_kernel_uri(configured())
    assert config.tracking.uri == uri.format(cwd=tmp_path)
    assert tracking_place(config) == f"; MLflow: {config.tracking.uri}"
    if "pass" in variable:
        assert with_password(str(config.tracking.uri)) == variable


def test_the_uri_of_the_configuration_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://example.com")
    assert with_kernel_uri(configured(uri="http://other:5000")).tracking.uri == "http://other:5000"
    assert with_kernel_uri(configured(mlflow=False)).tracking.uri is None


def test_without_any_uri_the_output_folder_has_the_database() -> None:
    config = with_kernel_uri(configured())
    assert config.tracking.uri is None
    assert tracking_place(config) == ""


def test_a_run_is_nested_below_the_run_that_was_active_in_the_kernel(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/team.db"
    client, experiment = open_database(tmp_path, uri=uri, experiment="churn")
    parent = client.create_run(experiment).info.run_id
    run = Run.new(tmp_path / "outputs")
    run.begin(parent=parent, tracking={"mlflow": True, "uri": uri, "experiment": "nbtoolkit"})
    run.train(range(3))
    run.end()
    tracked = client.get_run(str(follow(run.paths)))
    assert tracked.data.tags["mlflow.parentRunId"] == parent
    assert tracked.info.experiment_id == experiment
    assert client.get_experiment_by_name("nbtoolkit") is None


def test_a_run_whose_parent_is_gone_is_tracked_by_itself(tmp_path: Path) -> None:
    run = Run.new(tmp_path)
    run.begin(parent="0" * 32)
    run.end()
    assert follow(run.paths) is not None


NESTED = """
import mlflow

def train(config, ctx):
    assert ctx.fold is None or len(ctx.fold.train_indices)
    return {"val_loss": 0.1}

mlflow.set_tracking_uri("sqlite:///team.db")
mlflow.set_experiment("churn")
with mlflow.start_run():
    nb.launch(train, processes=1)
    nb.sweep(train, None, {"optim.lr": {"type": "float", "low": 1e-4, "high": 0.1}}, n_trials=1)
    nb.cross_validate(train, None, nb.make_folds([0, 1] * 4, k=2))
mlflow.end_run()
nb.launch(train, processes=1, name="alone")
"""


@pytest.mark.long
def test_launch_sweep_and_folds_log_where_the_users_mlflow_does(tmp_path: Path) -> None:
    with script(NESTED, tmp_path) as running:
        printed = running.output()
    place = f"; MLflow: sqlite:///{tmp_path}/team.db"
    lines = [line for line in printed.splitlines() if place in line]
    assert [f"{place}, below its active run " in line for line in lines] == [True] * 3 + [False]
    client = MlflowClient(f"sqlite:///{tmp_path}/team.db")
    churn, other = (client.get_experiment_by_name(name) for name in ("churn", "nbtoolkit"))
    runs = client.search_runs([churn.experiment_id])
    parents = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in runs}
    (active,) = (run for run, parent in parents.items() if parent is None)
    assert list(parents.values()).count(active) == 3
    assert len(parents) == 1 + 3 + 1 + 2  # with a trial and two folds
    assert {run.info.status for run in runs} == {"FINISHED"}
    (alone,) = client.search_runs([other.experiment_id])
    assert alone.info.run_name.split("-")[1] == "alone"
    assert "mlflow.parentRunId" not in alone.data.tags


class Refusing(BaseHTTPRequestHandler):
    """A tracking server that knows nobody; the class remembers the credentials it was shown."""

    shown: list[str | None]

    def _refuse(self) -> None:
        self.shown.append(self.headers["Authorization"])
        self.send_response(403)
        self.end_headers()

    do_GET = do_POST = _refuse

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Refusing.shown = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        thread = threading.Thread(target=refusing.serve_forever)
        thread.start()
        yield refusing
        refusing.shutdown()
        thread.join()


CREDENTIALS = """
import os

def train(config, ctx):
    return 1

nb.launch(train, processes=1)
os.environ["MLFLOW_TRACKING_USERNAME"] = "ann"
os.environ["MLFLOW_TRACKING_PASSWORD"] = "s3cret"
nb.launch(train, processes=1)
del os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]
os.environ["MLFLOW_TRACKING_TOKEN"] = "token"
print(nb.launch(train, processes=1).status)
"""


@pytest.mark.long
def test_credentials_that_a_cell_sets_reach_the_server_from_the_next_run_on(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    uri = f"http://127.0.0.1:{server.server_port}"
    with script(CREDENTIALS, tmp_path, MLFLOW_TRACKING_URI=uri) as running:
        printed = running.output()
    assert printed.splitlines()[-1] == "completed"
    assert "tracking did not write the whole run" in printed
    basic = "Basic " + base64.b64encode(b"ann:s3cret").decode()
    assert list(dict.fromkeys(Refusing.shown)) == [None, basic, "Bearer token"]
    assert not [
        file
        for file in (tmp_path / "outputs").rglob("*")
        if file.is_file() and b"s3cret" in file.read_bytes()
    ]


@pytest.mark.parametrize("form", [dict, list])
def test_a_tracking_uri_with_a_password_is_refused(form: type) -> None:
    uri = "https://lab:hunter2@tracking.example"
    overrides: Any = {"tracking.uri": uri} if form is dict else [f"tracking.uri={uri}"]
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        nb.load_config(overrides=overrides)
    assert "hunter2" not in str(caught.value)
