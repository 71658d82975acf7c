"""Optuna's and MLflow's dashboards: they listen on loopback only and end with the kernel."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from harmless import assert_harmless
from kernels import all_gone, descendants, script, until
from run_folders import write_run

import nbtoolkit as nb
from nbtoolkit.dashboards.server import Dashboard, browser_address, check_available
from nbtoolkit.errors import DashboardError, LaunchError, MissingExtra
from nbtoolkit.host import Host
from nbtoolkit.tracking.database import open_database

HERE = Host(kind="jupyter", reason="a test", working=Path(), scratch=Path())
KAGGLE = Host(kind="kaggle", reason="a test", working=Path(), scratch=Path())
COLAB = Host(kind="colab", reason="a test", working=Path(), scratch=Path())

# SQLAlchemy 2.1 about MLflow's own queries.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")


def waits(config, ctx):
    """Reports until the file ``end`` is there."""
    for step in range(1, 1000):
        ctx.report({"score": 1 / step}, step=step)
        if Path(config.model.end).exists():
            break
        time.sleep(0.05)


def asked(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """What a dashboard answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def states(port: int) -> list[str]:
    """The states of the trials that a dashboard of a study shows."""
    _, text = asked(port, "/api/studies")
    number = json.loads(text)["study_summaries"][0]["study_id"]
    shown = json.loads(asked(port, f"/api/studies/{number}")[1])["trials"]
    return [trial["state"] for trial in shown]


def listens(port: int, pids: set[int]) -> set[str]:
    """The addresses at which processes listen; that port is among theirs."""
    sockets = [
        socket.laddr
        for pid in pids
        for socket in psutil.Process(pid).net_connections()
        if socket.status == psutil.CONN_LISTEN
    ]
    assert port in [address.port for address in sockets]
    return {address.ip for address in sockets}


def family(dashboard: Dashboard) -> set[int]:
    guard = dashboard._guard.pid
    return {guard, *descendants(guard)}


# --- optuna-dashboard ---


@pytest.mark.long
def test_a_study_is_shown_while_its_sweep_runs_and_cannot_be_changed_there(
    tmp_path: Path,
) -> None:
    settings = {
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path / "<b>out"),
        "model.end": str(tmp_path / "end"),
    }
    space = {"study": {"metric": "score"}, "space": {"optim.lr": [0.1, 0.2]}}
    config = nb.load_config(env=None, overrides=settings)
    running = nb.sweep(waits, config, space, n_trials=4, wait=False, display="off")
    sweep = running.paths.folder
    until(lambda: (sweep / "study.jsonl").exists(), "the study")
    with nb.open_dashboard(sweep) as dashboard:
        assert nb.open_dashboard(sweep) is dashboard
        assert f"http://127.0.0.1:{dashboard.port}/" in repr(dashboard)
        assert_harmless(dashboard._repr_html_())
        assert 'rel="noopener"' in dashboard._repr_html_()
        pids = family(dashboard)
        assert listens(dashboard.port, pids) == {"127.0.0.1"}
        assert set(until(lambda: states(dashboard.port), "its first trials")) <= {
            "Running",
            "Waiting",
        }
        status, reason = asked(dashboard.port, "/api/studies/1", "DELETE")
        assert (status, "nothing is changed here" in reason) == (405, True)
        assert asked(dashboard.port, "/api/studies", Host="evil.example")[0] == 403
        (tmp_path / "end").touch()
        assert running.result().status == "completed"
        until(lambda: states(dashboard.port) == ["Complete"] * 4, "all trials")
        own = dashboard.log.parent
    all_gone(pids)
    assert not own.exists()
    assert [file.name for file in sweep.glob("study*")] == ["study.jsonl"]
    assert len(nb.attach(sweep).result().study.trials) == 4
    assert repr(dashboard).endswith("closed")
    assert nb.open_dashboard(sweep, wait=False) is not dashboard
    nb.open_dashboard(sweep, wait=False).close()


def test_what_is_no_sweep_has_no_dashboard(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", events=[{"type": "run"}])
    with pytest.raises(DashboardError, match=r"(?s)one has no study.*a sweep"):
        nb.open_dashboard(run.folder)
    with pytest.raises(LaunchError, match="there is no run"):
        nb.open_dashboard(tmp_path / "nowhere")


# --- MLflow ---


@pytest.mark.long
def test_what_was_tracked_is_shown_on_loopback_and_to_no_foreign_name(tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match="no run was tracked"):
        nb.open_mlflow(tmp_path)
    client, experiment = open_database(tmp_path, experiment="seen")
    client.create_run(experiment)
    with nb.open_mlflow(tmp_path) as dashboard:
        assert dashboard.url.startswith(f"http://127.0.0.1:{dashboard.port}/#/experiments")
        pids = family(dashboard)
        assert len(pids) >= 3  # the guard, the command and its server
        assert listens(dashboard.port, pids) == {"127.0.0.1"}
        api = "/api/2.0/mlflow/experiments/get-by-name?experiment_name=seen"
        status, text = asked(dashboard.port, api)
        assert (status, json.loads(text)["experiment"]["name"]) == (200, "seen")
        assert asked(dashboard.port, api, Host="evil.example")[0] == 403
    all_gone(pids)


def test_a_store_that_is_a_server_has_a_page_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match=r"http://there:5000, which has a page of its own"):
        nb.open_mlflow(tmp_path, uri="http://there:5000")


# --- any dashboard ---


def test_one_that_ends_shows_what_it_wrote() -> None:
    code = "print('no such store'); raise SystemExit(3)"
    with Dashboard("mine", HERE, [sys.executable, "-c", code]) as dashboard:
        with pytest.raises(DashboardError, match=r"(?s)mine has ended.*no such store"):
            dashboard.wait()
        assert dashboard.closed


def test_one_that_never_answers_is_ended_with_all_its_processes() -> None:
    """It ignores SIGTERM, as its child does."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('waiting', flush=True); time.sleep(600)"
    )
    dashboard = Dashboard("mine", HERE, [sys.executable, "-c", code])
    until(lambda: "waiting" in dashboard.log.read_text(), "its start")
    pids = family(dashboard)
    assert len(pids) == 3
    with pytest.raises(DashboardError, match=r"(?s)did not answer within 0.3 s.*waiting"):
        dashboard.wait(0.3)
    all_gone(pids)
    dashboard.close()


def test_one_ends_with_the_kernel_even_if_a_child_of_that_holds_its_pipes(tmp_path: Path) -> None:
    code = """
    import os, signal, time
    from pathlib import Path
    from nbtoolkit.dashboards.server import Dashboard
    from nbtoolkit.host import detect_host
    program = [sys.executable, "-m", "http.server", "-b", "127.0.0.1"]
    dashboard = Dashboard("files", detect_host(), program).wait()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not (child := os.fork()):
        time.sleep(600)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        Path("up").write_text(f"{dashboard._guard.pid} {child} {dashboard.log.parent}")
        time.sleep(600)
    except KeyboardInterrupt:
        while not dashboard.up():  # on a busy machine an answer may take longer than its second
            time.sleep(0.1)
        Path("interrupted").touch()
        time.sleep(600)
    """
    with script(code, tmp_path) as kernel:
        until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text(), "its start")
        guard, child, folder = (tmp_path / "up").read_text().split(maxsplit=2)
        pids = {int(guard), *descendants(int(guard))}
        kernel.interrupt()  # is for the kernel's group alone
        until((tmp_path / "interrupted").exists, "the interrupt")
        kernel.kill()
        all_gone(pids)
        os.kill(int(child), signal.SIGKILL)
    until(lambda: not Path(folder).exists(), "the end of its folder")


def test_one_that_is_left_open_ends_with_a_program_without_a_word(tmp_path: Path) -> None:
    open_database(tmp_path)
    code = f"""
    import warnings
    warnings.simplefilter("error")
    dashboard = nb.open_mlflow({str(tmp_path)!r}, wait=False)
    print(dashboard._guard.pid, dashboard.log.parent)
    """
    with script(code, tmp_path) as program:
        out, err = program.end()
    guard, folder = out.rstrip("\n").split(maxsplit=1)
    assert (err, Path(folder).exists(), Path(f"/proc/{guard}").exists()) == ("", False, False)


def test_what_is_not_installed_is_named_by_its_package() -> None:
    with pytest.raises(MissingExtra, match=r"mlflow is not installed\n.*pip install mlflow"):
        check_available("mlflow", ("sys", "no_such_module"), HERE, "")
    check_available("mlflow", ("sys",), HERE, "")


# --- how a browser gets there ---


def test_beside_the_kernel_it_is_a_link_and_from_elsewhere_a_tunnel() -> None:
    url, how = browser_address(8080, HERE)
    assert url == "http://127.0.0.1:8080/"
    assert "ssh -N -L 8080:127.0.0.1:8080" in how


def test_on_kaggle_nothing_can_be_reached_and_that_is_said(tmp_path: Path) -> None:
    open_database(tmp_path)
    with pytest.raises(DashboardError, match="Kaggle lets no browser reach a port"):
        nb.open_mlflow(tmp_path, host=KAGGLE)


def test_on_colab_a_cell_opens_it() -> None:
    url, how = browser_address(8080, COLAB)
    assert url == ""
    assert "output.serve_kernel_port_as_window(8080)" in how
