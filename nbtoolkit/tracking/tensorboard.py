"""Write a run as TensorBoard event files, in the run's own folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import MissingExtra
from nbtoolkit.run.events import Event, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tracking.tracker import Point

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


def tensorboard_folder(paths: RunPaths) -> Path:
    """Return the ``tensorboard --logdir`` of one run; the output folder is that of all runs."""
    return paths.folder / "tensorboard"


class TensorBoardTracker:
    """Writes one run folder's curves with torch's SummaryWriter.

    Args:
        paths: the run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._folder = tensorboard_folder(paths)
        self.place = str(self._folder)
        self._opened: SummaryWriter | None = None

    def open(self, run: RunStarted, *, fresh: bool, done: bool) -> bool:
        """Start the folder, or continue it."""
        if fresh:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._write_text(run)
        return self._folder.is_dir()

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write the curves and flush them."""
        if points:
            writer = self._writer()
            for point in points:
                writer.add_scalar(point.name, point.value, point.step, point.time)
            writer.flush()

    def close(self, ended: RunEnded) -> None:
        """Close the file."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def for_job(self, paths: RunPaths) -> TensorBoardTracker:
        """Write the curves of a trial or a fold in its own folder."""
        return TensorBoardTracker(paths)

    def _writer(self) -> SummaryWriter:
        """Return the event file, new at the first write: TensorBoard draws a folder as one."""
        if self._opened is None:
            self._opened = _summary_writer(self._folder)
        return self._opened

    def _write_text(self, run: RunStarted) -> None:
        for name, values in (("config", run.config), ("plan", run.plan)):
            text = json.dumps(values, indent=2, default=str)
            indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown's verbatim
            self._writer().add_text(name, indented, 0, run.t)


def _summary_writer(folder: Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise MissingExtra(
            f"TensorBoard cannot be imported: {error}",
            do="pip install tensorboard, or set tracking.tensorboard: false",
        ) from error
    return SummaryWriter(str(folder))
