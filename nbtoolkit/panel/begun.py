"""Begun: the notebooks that a panel has started, until their run is there, and to their own end."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from nbtoolkit.errors import LaunchError
from nbtoolkit.notebooks.handle import NotebookHandle


class Begun:
    """Notebooks in the background; looked at by the clock's thread.

    Attributes:
        last: the one that was started last; None: none was.
        starting: the one whose run is not there yet; None: there is none.
        run: the folder of the run that was started last, once it is there.
    """

    def __init__(self) -> None:
        self.last: NotebookHandle | None = None
        self.starting: NotebookHandle | None = None
        self.run: Future[Path] = Future()
        self._at_work: list[NotebookHandle] = []

    def add(self, notebook: NotebookHandle) -> Future[Path]:
        """Follow another notebook; its run's folder, once it is there."""
        self.last = self.starting = notebook
        self.run = Future()
        return self.run

    def look(self) -> Path | None:
        """The folder of a run that has come since the last look; None: none has.

        Raises:
            NotebookFailed: a notebook has failed, before its run came or after.
        """
        for notebook in [one for one in self._at_work if one.done()]:
            self._at_work.remove(notebook)
            notebook.result()
        return None if self.starting is None else self._arrived(self.starting)

    def said(self) -> str:
        """What is waited for, in words; empty: nothing is."""
        if self.starting is None:
            return ""
        return f"starting the notebook {self.starting.output}; its log: {self.starting.log}"

    def _arrived(self, notebook: NotebookHandle) -> Path | None:
        done = notebook.done()  # asked first: what it starts before its end is in the list then
        if runs := notebook.runs:
            self.starting = None
            self._at_work.append(notebook)
            self.run.set_result(runs[-1])
            return runs[-1]
        if done:
            self.starting = None
            self._failed(notebook)
        return None

    def _failed(self, notebook: NotebookHandle) -> None:
        try:
            notebook.result()
            raise LaunchError(
                f"the notebook {notebook.output} came to its end, and started nothing",
                do="look at its cells",
            )
        except BaseException as error:
            self.run.set_exception(error)
            raise
