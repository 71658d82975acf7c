"""Create and open the MLflow database of an output folder, under a lock; read it as a table.

    <output_dir>/mlflow.db        runs, parameters, metrics
    <output_dir>/mlartifacts/     files of the runs
    <output_dir>/.mlflow.lock     held while the two are created

Four processes that open a new SQLite store at the same time destroy it: MLflow 3.17 runs its 68
migrations in all of them, and afterwards the file cannot be opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.kernel_mlflow import with_password
from nbtoolkit.errors import MissingExtra, TrackingError

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient
    from pandas import DataFrame

DEFAULT_EXPERIMENT = "nbtoolkit"

SWEEP_TAG = "nbtoolkit.sweep"
"""The tag that all runs below a sweep have, at any depth: the sweep's run id."""

_SQLITE_MAGIC = b"SQLite format 3\0"


def database_path(output_dir: Path) -> Path:
    """Return the SQLite file of an output folder."""
    return output_dir.absolute() / "mlflow.db"


def database_uri(path: Path) -> str:
    """Return the ``mlflow ui --backend-store-uri`` of an SQLite file, by its absolute path.

    Raises:
        TrackingError: the path cannot be written as a URI.
    """
    if "?" in str(path):
        raise TrackingError(
            f"{path} cannot be an MLflow database: everything after '?' would be read as options",
            do="set runtime.output_dir to a folder without '?' in its path, or set tracking.uri",
        )
    return f"sqlite:///{path.absolute()}"


def open_database(
    output_dir: Path,
    *,
    uri: str | None = None,
    experiment: str | None = None,
    parent: str | None = None,
) -> tuple[MlflowClient, str]:
    """Open a store, and create what is missing: the file, the schema, the experiment.

    Args:
        output_dir: the folder of the database, the artifacts and the lock.
        uri: another MLflow store: a server, or ``sqlite:///`` and a path (relative to
            ``output_dir``), whose folder then has the artifacts and the lock.
        experiment: the experiment's name; ``"nbtoolkit"`` when None.
        parent: the id of an MLflow run, whose experiment comes first if the store has this run.

    Returns:
        A client, and the experiment's id.

    Raises:
        MissingExtra: MLflow is not installed.
        TrackingError: the store cannot be used.
    """
    client_class = import_client()
    from mlflow.exceptions import MlflowException

    file = database_file(output_dir, uri)
    folder = file.parent if file else output_dir
    where = database_uri(file) if file else str(uri)  # without a password, for messages
    artifacts = (folder / "mlartifacts").as_uri() if file else None  # a server has its own
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".mlflow.lock").open("w") as lock, _collector_off():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if file and not _exists(file):
                _create(file, str(artifacts))
            client = client_class(tracking_uri=with_password(where))
            above = get_run(client, parent) if parent else None
            if above is not None:
                return client, above.info.experiment_id
            return client, _experiment(client, experiment or DEFAULT_EXPERIMENT, artifacts)
    except (MlflowException, OSError, sqlite3.Error) as error:
        raise TrackingError(
            f"the MLflow store {where} cannot be used: {error}",
            do="see the reason above; set tracking.uri to another store, or move the file away and "
            "write it again with nbtoolkit.tracking.replay(folder)",
        ) from error


def get_run(client: MlflowClient, run_id: str) -> Run | None:
    """Return an MLflow run; None: the store does not have it."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def import_client() -> type[MlflowClient]:
    """Import MLflow (0.9 s; its modules for SQLite at the first use, 0.4 s).

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        with _collector_off():
            from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise MissingExtra(
            f"MLflow cannot be imported: {error}",
            do="pip install mlflow, or set tracking.mlflow: false",
        ) from error
    return MlflowClient


def database_file(output_dir: Path, uri: str | None) -> Path | None:
    """Return the SQLite file in which runs are tracked; None: they are tracked elsewhere.

    Args:
        output_dir: ``runtime.output_dir``.
        uri: ``tracking.uri``; None: the folder's own file.
    """
    if uri is None:
        return database_path(output_dir)
    prefix = "sqlite:///"
    return output_dir.absolute() / uri[len(prefix) :] if uri.startswith(prefix) else None


def _exists(file: Path) -> bool:
    """Whether there is a database; MLflow itself would refuse another file after 100 s only.

    Raises:
        TrackingError: the file is not a database.
    """
    if not file.exists() or not file.stat().st_size:
        return False
    with file.open("rb") as opened:
        if opened.read(len(_SQLITE_MAGIC)) != _SQLITE_MAGIC:
            raise TrackingError(
                f"{file} is not an SQLite database",
                do="move it away and write it again with nbtoolkit.tracking.replay(folder)",
            )
    return True


def _create(file: Path, artifacts: str) -> None:
    """Write a new database file.

    MLflow migrates it in memory (0.45 s, against 0.75 s in a file), then it is renamed: a killed
    process leaves no incomplete schema.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        _migrate_into(temporary, artifacts)
        os.replace(temporary, file)
        _forget_connections(file, artifacts)
    finally:
        temporary.unlink(missing_ok=True)


def _migrate_into(file: Path, artifacts: str) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore("sqlite://", artifacts)  # type: ignore[no-untyped-call] # not annotated
    with contextlib.closing(sqlite3.connect(file)) as target, store.engine.connect() as memory:
        source = memory.connection.driver_connection
        assert isinstance(source, sqlite3.Connection)
        source.backup(target)
    store.engine.dispose()  # MLflow caches engines by URI: the next new database must start empty


def _forget_connections(file: Path, artifacts: str) -> None:
    """Close MLflow's cached engine of this URI, which may have a deleted file open."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore(database_uri(file), artifacts)  # type: ignore[no-untyped-call] # same
    store.engine.dispose()


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    known = client.get_experiment_by_name(name)
    if known is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    if known.lifecycle_stage == "deleted":
        raise TrackingError(
            f"the MLflow experiment {name!r} was deleted",
            do=f"restore it (mlflow experiments restore -x {known.experiment_id}), or set "
            "tracking.experiment to another name",
        )
    return str(known.experiment_id)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Import and migrate without the garbage collector.

    Their objects stay, and scanning them again and again takes a quarter of the time (2.7 s in all,
    2.0 s without; MLflow 3.17 on two cores).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def tracking_table(
    output_dir: str | os.PathLike[str] = "outputs", *, experiment: str | None = None
) -> DataFrame:
    """Return the tracked runs, newest first.

    Args:
        output_dir: the folder that holds ``mlflow.db``.
        experiment: one experiment's name; None: all of them.

    Returns:
        One row per run: ``run``, ``sweep`` (the run id of the sweep that a trial or fold belongs
        to), ``status``, ``started``, each last metric under its name, each parameter under
        ``params.`` and its name.

    Raises:
        MissingExtra: MLflow is not installed.
        TrackingError: there is no database, or no such experiment.
    """
    import pandas as pd

    path = database_path(Path(output_dir).expanduser())
    if not path.exists():
        raise TrackingError(
            f"there is no {path}", do="give the folder that runtime.output_dir named in the launch"
        )
    client = import_client()(tracking_uri=database_uri(path))
    experiments = {entry.name: entry.experiment_id for entry in client.search_experiments()}
    if experiment is not None and experiment not in experiments:
        raise TrackingError(
            f"there is no experiment {experiment!r} in {path}",
            allowed=", ".join(map(repr, sorted(experiments))),
        )
    ids = list(experiments.values()) if experiment is None else [experiments[experiment]]
    return pd.DataFrame([_row(run) for run in client.search_runs(ids)])


def _row(run: Run) -> dict[str, object]:
    import pandas as pd

    return {
        "run": run.info.run_name,
        "sweep": run.data.tags.get(SWEEP_TAG),
        "status": run.data.tags.get("nbtoolkit.status", run.info.status.lower()),
        "started": pd.to_datetime(run.info.start_time, unit="ms", utc=True),
        **run.data.metrics,
        **{f"params.{key}": value for key, value in run.data.params.items()},
    }
