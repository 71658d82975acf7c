"""Reach the PostgreSQL server of a study that several machines share.

A URL may contain a password. It is in the memory of the processes that use it, and nowhere else:
:func:`split_storage` takes it out of the settings, which are written to the sweep's folder, and
:func:`reason` out of the server's errors.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import MissingExtra, SpaceError, SweepError

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from sqlalchemy.engine import URL

    from nbtoolkit.study.sweep_config import SweepConfig

PATIENCE = 120.0
"""Seconds that a call waits for a server which is being restarted."""

_DRIVER = "postgresql+psycopg"
_EXAMPLE = f"{_DRIVER}://user@host:5432/database, or $NAME: the URL is in this variable"
_RETRY_SECONDS = 1.0
_LOCK_SECONDS = 60
_Value = TypeVar("_Value")


def split_storage(sweep_config: SweepConfig) -> tuple[SweepConfig, URL | None]:
    """Return a sweep's settings without a password, and the URL of its study.

    Args:
        sweep_config: ``study.storage`` is a URL, ``$NAME`` for one in an environment variable, or
            None: the study is in the sweep's folder.

    Raises:
        SpaceError: the setting is no URL of a PostgreSQL server; the error does not quote it.
    """
    given = sweep_config.study.storage
    if given is None:
        return sweep_config, None
    # They take 0.15 s.
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    named, text = given.startswith("$"), given
    if named:
        text = os.environ.get(given[1:], "")
        if not text:
            raise SpaceError(
                f"study.storage: the environment variable {given[1:]} is not set",
                allowed=_EXAMPLE,
                do=f"set {given[1:]} where the sweep is started, and in a cluster's jobs",
            )
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise _no_server("no URL") from None
    if url.drivername not in ("postgresql", _DRIVER):
        raise _no_server(f"a URL of {url.drivername}")
    url = url.set(drivername=_DRIVER)
    shown = given if named else url.render_as_string(hide_password=True)
    study = sweep_config.study.model_copy(update={"storage": shown})
    return sweep_config.model_copy(update={"study": study}), url


def _no_server(what: str) -> SpaceError:
    return SpaceError(
        f"study.storage: {what}; machines can share a study on a PostgreSQL server only",
        allowed=_EXAMPLE,
        do="correct it, or take study.storage out: the study is then a file in the sweep's folder",
    )


def check_server(url: URL) -> None:
    """Connect once.

    Raises:
        MissingExtra: the driver is not installed.
        SweepError: the server does not answer, or refuses the user.
    """
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DBAPIError

    try:
        engine = create_engine(url, connect_args={"connect_timeout": 10})
    except ImportError as error:
        raise MissingExtra(
            f"study.storage needs PostgreSQL's driver: {error}", do=install_line("postgresql")
        ) from error
    try:
        with engine.connect():
            pass
    except DBAPIError as error:
        raise _unreachable(url, error, "does not answer") from None
    finally:
        engine.dispose()


def _unreachable(url: URL, error: BaseException, what: str) -> SweepError:
    return SweepError(
        f"the study's server {url.render_as_string(hide_password=True)} {what}: "
        f"{reason(error, url)}",
        allowed="a PostgreSQL server that this machine reaches, with the user and database of "
        "study.storage",
        do="check the server, host, port, user and password (also ~/.pgpass and PGPASSWORD), and "
        "run the same call again: what is in the study stays",
    )


def reason(error: BaseException, url: URL) -> str:
    """Return the first line of a server's error, without the URL's password."""
    text = str(getattr(error, "orig", None) or error).partition("\n")[0]
    return text.replace(str(url.password), "***") if url.password else text


def lost_connection(error: BaseException) -> BaseException | None:
    """Return the error of the connection that an error comes from; None if it has another cause.

    SQLAlchemy's OperationalError is also that of a server which starts or ends, of a deadlock and
    of a lock that took too long: each is over after a while.
    """
    from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

    cause: BaseException | None = error
    while cause is not None:  # Optuna wraps them
        broken = isinstance(cause, DBAPIError) and cause.connection_invalidated
        if broken or isinstance(cause, (OperationalError, InterfaceError)):
            return cause
        cause = cause.__cause__
    return None


class StudyServer:
    """A study's server, and the signs of life that this machine gives for its trials there.

    Args:
        url: of :func:`split_storage`.
        name: the study's.
        heartbeat: seconds between two signs of life. A trial without one for twice this time is
            taken over by another machine.
        note: shows the user a message.

    Raises:
        SweepError: the server does not answer.
    """

    def __init__(
        self, url: URL, name: str, heartbeat: float, note: Callable[[str, str], None]
    ) -> None:
        from sqlalchemy import create_engine

        self._url, self._note = url, note
        self.heartbeat = heartbeat
        self.trials: dict[int, int] = {}
        """The trials of this machine that run: number and Optuna's id."""
        # When the server last did not answer, as far as this machine knows (monotonic).
        self._trouble = time.monotonic()
        # PostgreSQL's key of a lock is a signed number of 64 bits.
        digest = hashlib.sha256(f"nbtoolkit {name}".encode()).digest()
        self._key = int.from_bytes(digest[:8], "big", signed=True)
        self._options = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        self._engine = create_engine(url, **self._options)
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="nbtoolkit-beats", daemon=True)
        try:
            self.storage = self.patiently(self._open)
        except BaseException:
            self._engine.dispose()
            raise

    def _open(self) -> RDBStorage:
        from optuna.storages import RDBStorage
        from sqlalchemy import inspect

        with ExitStack() as stack:
            # Two machines that create the tables at once would both fail. This table is the last.
            there = inspect(self._engine).get_table_names()
            if "alembic_version" not in there:
                stack.enter_context(self.lock())
            elif "studies" not in there:  # MLflow's, which would be damaged
                raise self._foreign()
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # Optuna calls signs of life experimental
            return RDBStorage(
                self._url.render_as_string(hide_password=False),
                engine_kwargs=dict(self._options),
                heartbeat_interval=max(1, round(self.heartbeat)),
                grace_period=max(2, round(2 * self.heartbeat)),
            )

    def _foreign(self) -> SweepError:
        shown = self._url.render_as_string(hide_password=True)
        return SweepError(
            f"the database of study.storage, {shown}, belongs to another program",
            allowed="a database of its own, empty or with Optuna's tables; not that of MLflow",
            do="make one (createdb studies), and name it in study.storage",
        )

    def patiently(self, call: Callable[[], _Value]) -> _Value:
        """Call a function that uses the server, again while the server does not answer.

        Raises:
            SweepError: it did not answer for :data:`PATIENCE` seconds.
        """
        began = None
        while True:
            try:
                return call()
            except Exception as error:
                lost = lost_connection(error)
                if lost is None:
                    raise
                now = self._trouble = time.monotonic()
                if began is None:
                    began = now
                    text = f"the study's server does not answer: {reason(lost, self._url)}"
                    self._note(f"{text}; trying for {PATIENCE:g} s", "warning")
                if now - began > PATIENCE:
                    what = f"did not answer for {PATIENCE:g} s"
                    raise _unreachable(self._url, lost, what) from None
            time.sleep(_RETRY_SECONDS)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the study's lock; one machine at a time does.

        The server releases it when the machine dies, or does not continue for a minute.
        """
        from sqlalchemy import text

        with self._engine.begin() as connection:
            for limit in ("lock_timeout", "idle_in_transaction_session_timeout"):
                connection.execute(text(f"SET LOCAL {limit} = '{_LOCK_SECONDS}s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": self._key})
            yield

    @property
    def may_judge(self) -> bool:
        """Whether a missing sign of life is the other machine's fault.

        After the server was away, the other machines need a moment, too.
        """
        return time.monotonic() - self._trouble > 2 * self.heartbeat

    def start(self, number: int, trial_id: int) -> None:
        """Give signs of life for a trial from now on."""
        self.storage.record_heartbeat(trial_id)
        self.trials[number] = trial_id
        if not self._beats.is_alive():
            self._beats.start()

    def close(self) -> None:
        """End the signs of life, and the connections."""
        self._ended.set()
        if self._beats.is_alive():
            self._beats.join()
        self.storage.remove_session()
        self.storage.engine.dispose()
        self._engine.dispose()

    def _beat(self) -> None:
        """Give the signs of life; in a thread, since a sampler may compute for long."""
        pause = self.heartbeat
        while not self._ended.wait(pause):
            pause = self.heartbeat
            for trial_id in list(self.trials.values()):
                try:
                    self.storage.record_heartbeat(trial_id)
                except Exception as error:
                    if lost_connection(error) is None:
                        raise
                    self._trouble, pause = time.monotonic(), min(_RETRY_SECONDS, pause)
                    break
        self.storage.remove_session()
