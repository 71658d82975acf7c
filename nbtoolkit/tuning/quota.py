"""Count the device-hours of the runs of an output folder, by host and week."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.archive.pack import output_folder
from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import TuningError
from nbtoolkit.run.device_ledger import quota_hours, spans_by_week, update_ledger, week_of
from nbtoolkit.run.paths import folder_error
from nbtoolkit.text_table import counted
from nbtoolkit.tuning.answer import Table

_HEADER = ("host", "week from", "device", "runs", "device-hours", "used", "of", "left")


@dataclass(frozen=True, kw_only=True)
class QuotaRow:
    """What the runs of a host and a week used of one kind of device."""

    host: str
    week: str
    """The day on which the week begins, at 00:00 UTC: a Saturday on Kaggle, else a Monday."""
    device: str
    runs: int
    """Runs, trials and folds; attempts of one run count once."""
    device_hours: float
    """GPUs times hours, summed over the runs; 0 on the CPU."""
    used: float
    """Hours of the host's quota: on Kaggle those in which at least one run was there, since the
    quota counts the session and not its GPUs; else :attr:`device_hours`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Quota(Table):
    """The device-hours of the runs of an output folder, from :func:`quota`."""

    rows: tuple[QuotaRow, ...]
    """One row for each host, week and kind of device, the newest week first."""
    hours: float | None
    """The GPU hours of the weekly quota; None if they are not known."""
    folder: Path
    """The output folder. Its file ``quota.json`` stores the hours of deleted runs."""

    @property
    def used(self) -> float:
        """The hours of the quota that the runs have used in the present week, on all hosts."""
        now = time.time()
        rows = (row for row in self.rows if row.week == f"{week_of(row.host, now):%Y-%m-%d}")
        return sum(row.used for row in rows)

    @property
    def left(self) -> float | None:
        """The hours of the quota that are left in the present week; None if it is not known."""
        return None if self.hours is None else max(0.0, self.hours - self.used)

    @property
    def why(self) -> str:
        """The number of runs and the folder, as a line of text."""
        runs = sum(row.runs for row in self.rows)
        return f"{counted(runs, 'run') if runs else 'no runs'} in {self.folder}"

    def columns(self) -> tuple[Sequence[str], list[list[str]]]:
        """Return the names of the columns, and the texts of each row."""
        lines = []
        for row in self.rows:
            line = [row.host, row.week, row.device, str(row.runs)]
            line += [f"{row.device_hours:.2f}", f"{row.used:.2f}", "", ""]
            if self.hours is not None and row.device != "CPU":
                same = [one for one in self.rows if (one.host, one.week) == (row.host, row.week)]
                used = sum(one.used for one in same)
                line[-2:] = f"{self.hours:g}", f"{max(0.0, self.hours - used):.2f}"
            lines.append(line)
        return _HEADER, lines


def quota(output_dir: str | os.PathLike[str] | None = None, *, hours: float | None = None) -> Quota:
    """Count the device-hours that the runs of an output folder used, by host and week.

    The time of each attempt of a run counts, from its first event to its last one, even if the
    attempt was killed. A deleted run counts if the panel deleted it, or if :func:`quota` was called
    while the run existed. The file ``quota.json`` in the output folder keeps its hours, and
    :func:`nbtoolkit.pack` packs this file. The time between the runs of a notebook is not counted
    here, although Kaggle's own quota counts it.

    Args:
        output_dir: the output folder; None: ``runtime.output_dir`` of the default configuration.
        hours: the GPU hours of a week's quota (Kaggle: 30); None: ``runtime.quota_hours``.

    Raises:
        TuningError: there is no such folder, or ``hours`` is not positive.
        RunFileError: the events of a run, or ``quota.json``, cannot be read.
        RunFolderError: the folder cannot be written.
    """
    folder = output_folder() if output_dir is None else Path(output_dir).expanduser().absolute()
    if not folder.is_dir() or (hours is not None and not hours > 0):
        raise TuningError(
            f"the quota is {hours!r} hours" if folder.is_dir() else f"there is no folder {folder}",
            allowed="an output folder with runs, and hours above 0",
            do='nb.quota("outputs", hours=30)',
        )
    try:
        entries = update_ledger(folder)
    except OSError as error:
        raise folder_error(folder, error) from error
    groups: dict[tuple[str, str, str], list[tuple[str, float, float, int]]] = {}
    for usage in entries:
        for week, begin, end in spans_by_week(usage):
            key = f"{week:%Y-%m-%d}", usage.host, usage.device
            groups.setdefault(key, []).append((usage.run, begin, end, usage.devices))
    rows = [
        QuotaRow(
            host=host,
            week=week,
            device=device,
            runs=len({run for run, *_ in spans}),
            device_hours=quota_hours("", [(begin, end, count) for _, begin, end, count in spans]),
            used=quota_hours(host, [(begin, end, count) for _, begin, end, count in spans]),
        )
        for (week, host, device), spans in sorted(groups.items(), reverse=True)
    ]
    limit = load_config().runtime.quota_hours if hours is None else hours
    return Quota(rows=tuple(rows), hours=limit, folder=folder)
