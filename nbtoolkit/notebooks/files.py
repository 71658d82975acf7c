"""Name the executed copy of a notebook and the files beside it.

<name>.ipynb        the executed copy, whole after every cell
<name>.html         the same to look at
<name>.run.json     parameters, published values, how it ended; who runs it, in the background
<name>.run.log      everything the cells wrote, without limit; locked while the notebook runs
<name>.runs.txt     the folders of the runs it has started, a line each; none: it has started none
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from nbtoolkit.errors import NbtoolkitError, NotebookError
from nbtoolkit.run.paths import write_whole

_LOCK_TRIES = 3


@dataclass(frozen=True)
class NotebookFiles:
    """The files of one notebook's run, around the path of its executed copy."""

    copy: Path

    @property
    def html(self) -> Path:
        """The executed copy as a page."""
        return self.copy.with_suffix(".html")

    @property
    def record(self) -> Path:
        """How it ended (JSON)."""
        return self.copy.with_suffix(".run.json")

    @property
    def log(self) -> Path:
        """All output."""
        return self.copy.with_suffix(".run.log")

    @property
    def runs(self) -> Path:
        """Which runs it has started."""
        return self.copy.with_suffix(".runs.txt")

    def running(self) -> bool:
        """Whether somebody runs a notebook to here: its log is locked."""
        try:
            with open(self.log, "rb") as log:
                fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True

    def open(self) -> TextIO:
        """Lock and empty the log, and take away what an earlier run left.

        Returns:
            The log, open for appending; closing it opens the lock.

        Raises:
            NotebookError: the folder cannot be written, or another run has these files.
        """
        try:
            self.copy.parent.mkdir(parents=True, exist_ok=True)
            log = open(self.log, "a", encoding="utf-8")  # noqa: SIM115 - as long as the run
        except OSError as error:
            raise not_written(self.copy, error, NotebookError) from error
        if not _locked(log):
            log.close()
            raise NotebookError(
                f"another run writes to {self.copy}",
                allowed="one run for each executed copy at a time",
                do="wait for it, or choose another output",
            )
        os.truncate(log.fileno(), 0)
        for old in (self.copy, self.html, self.record, self.runs):
            old.unlink(missing_ok=True)
        return log

    def write_html(self, notebook: str) -> None:
        """Write the page of an executed notebook.

        Args:
            notebook: its JSON text.
        """
        import nbformat
        from nbconvert.exporters.html import HTMLExporter

        page, _ = HTMLExporter().from_notebook_node(nbformat.reads(notebook, as_version=4))
        write_whole(self.html, page, durable=False)


def _locked(log: TextIO) -> bool:
    """Lock an open log; False: a run holds it. Who asks whether one does holds it for a moment."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def not_written(copy: Path, error: OSError, kind: type[NbtoolkitError]) -> NbtoolkitError:
    """An OSError met while writing a run's files, as an error that says what to do."""
    return kind(
        f"the executed copy {copy} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do='free some space, or choose another place: output="...", or --output in a shell',
    )


def files_for(notebook: Path, output: str | os.PathLike[str] | None) -> NotebookFiles:
    """The files of a run.

    Args:
        notebook: the notebook that is run.
        output: where its executed copy goes; None: ``outputs/<UTC time>-<name>-<4 hex>.ipynb``.

    Raises:
        NotebookError: ``output`` is no ``.ipynb``, or the notebook itself.
    """
    if output is None:
        return NotebookFiles(Path("outputs").absolute() / fresh_name(notebook.stem))
    path = Path(output).expanduser().absolute()
    if path.suffix != ".ipynb":
        raise NotebookError(
            f"the output {path} is no notebook's name",
            allowed="a path that ends in .ipynb; HTML, record and log are put beside it",
            do=f"output={str(path / notebook.name)!r}",
        )
    if path.resolve() == notebook.resolve():
        raise NotebookError(
            f"the output {path} is the notebook itself",
            allowed="another path: the notebook is not changed by running it",
            do="leave output out, and it goes to outputs/",
        )
    return NotebookFiles(path)


def fresh_name(name: str) -> str:
    """A new name for an executed copy: ``<UTC time>-<name>-<4 hex>.ipynb``."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    return f"{stamp}-{name}-{secrets.token_hex(2)}.ipynb"
