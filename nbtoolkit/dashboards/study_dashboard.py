"""Open optuna-dashboard on a sweep (``nb.open_dashboard``), while it runs or afterwards."""

from __future__ import annotations

import os
from pathlib import Path

from nbtoolkit.dashboards.server import Dashboard, missing, python, shared, unreachable
from nbtoolkit.errors import DashboardError, MissingExtra
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.paths import find_run
from nbtoolkit.search.sweep_result import STUDY_FILE

_SERVER = "nbtoolkit.dashboards.study_server"


def open_dashboard(
    sweep: str | os.PathLike[str], *, wait: bool = True, host: Host | None = None
) -> Dashboard:
    """Open optuna-dashboard on a sweep, on a port of 127.0.0.1.

    It follows the sweep; what would change the study is refused. It ends with ``close()`` and with
    the kernel. A second call gives the same one.

    Args:
        sweep: its folder, or its id under ``outputs``.
        wait: whether to wait until it answers (about 1 s).
        host: where this process runs; default: detected.

    Raises:
        MissingExtra: optuna-dashboard is not installed.
        DashboardError: it is no sweep, no browser can reach it here, or it does not come up.
        LaunchError: there is no such run.
    """
    host = host or detect_host()
    folder = find_run(sweep).folder
    if package := missing("optuna_dashboard"):
        raise MissingExtra(f"{package} is not installed", do=f"pip install {package}")
    if why := no_dashboard(folder, host):
        raise DashboardError(why, allowed="the folder of a sweep, where a browser can reach it")

    def open_one() -> Dashboard:
        study = str(folder / STUDY_FILE)
        return Dashboard(
            f"optuna-dashboard of {folder.name}",
            host,
            lambda port, own: python(_SERVER, study, str(port)),
            "/api/meta",
        )

    dashboard = shared(("study", folder), open_one)
    return dashboard.wait() if wait else dashboard


def no_dashboard(folder: Path | None, host: Host) -> str:
    """Why there is no dashboard of a folder; empty: there can be.

    Args:
        folder: of a run; None: there is none.
        host: where this process runs.
    """
    if package := missing("optuna_dashboard"):
        return f"{package} is not installed: pip install {package}"
    if why := unreachable(host):
        return why
    if folder is None or not (folder / STUDY_FILE).is_file():
        return "no sweep is watched" if folder is None else f"{folder.name} has no study"
    return ""
