"""What nb.pack and nb.unpack did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.runtime.disk import size_text
from nbtoolkit.runtime.table import html_table


@dataclass(frozen=True, kw_only=True, repr=False)
class PackResult:
    """A bundle that was written; :func:`nbtoolkit.unpack` takes it."""

    path: Path
    """The bundle."""
    size: int
    """Its bytes."""
    files: int
    """How many files are in it."""
    runs: tuple[str, ...]
    """The runs, sweeps and cross-validations in it, by their folders."""
    left_out: tuple[str, ...]
    """What was left out, in words: for lack of room, or for what it is."""
    notes: tuple[str, ...]
    """What else is to be known: runs that were going on."""
    seconds: float
    """How long it took."""

    def __repr__(self) -> str:
        left_out = "".join(f", without {what}" for what in self.left_out)
        return f"PackResult({_runs(self.runs)}, {size_text(self.size)}{left_out}, {self.path})"

    def _repr_html_(self) -> str:
        rows = [
            ("bundle", str(self.path)),
            ("holds", f"{_runs(self.runs)}, {self.files} files, {size_text(self.size)}"),
        ]
        return html_table("packed", rows, [*(f"left out: {t}" for t in self.left_out), *self.notes])


@dataclass(frozen=True, kw_only=True, repr=False)
class UnpackResult:
    """What a bundle brought into an output folder."""

    bundle: Path | None
    """The bundle, or the folder of runs; None: none was found, and nothing was done."""
    folder: Path
    """The output folder."""
    new: tuple[str, ...] = ()
    """Runs that were not there before, by their folders."""
    advanced: tuple[str, ...] = ()
    """Runs that were there, and are now as far as in the bundle."""
    unchanged: tuple[str, ...] = ()
    """Runs that were left as they were: equally far, further, or going on."""
    files: int = 0
    """Files beside the runs that were written."""
    tracked: tuple[str, ...] = ()
    """Runs that MLflow's database has by this call, by their folders."""
    notes: tuple[str, ...] = ()
    """What else is to be known: what the bundle lacks, what was not taken and why."""

    def __repr__(self) -> str:
        if self.bundle is None:
            return f"UnpackResult(nothing found to unpack into {self.folder})"
        return f"UnpackResult({self._taken()}, from {self.bundle}, in {self.folder})"

    def _repr_html_(self) -> str:
        if self.bundle is None:
            return html_table("unpacked: nothing was found", [("folder", str(self.folder))])
        rows = [("bundle", str(self.bundle)), ("folder", str(self.folder)), ("took", self._taken())]
        return html_table("unpacked", rows, self.notes)

    def _taken(self) -> str:
        parts = [("new", self.new), ("advanced", self.advanced), ("unchanged", self.unchanged)]
        told = [f"{len(runs)} {what}" for what, runs in parts if runs]
        mlflow = f"; MLflow: {_runs(self.tracked)}" if self.tracked else ""
        return f"runs: {', '.join(told) or 'none'}; other files: {self.files}{mlflow}"


def _runs(runs: tuple[str, ...]) -> str:
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
