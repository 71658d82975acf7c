"""Hazard: one place in a notebook that will go wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ADVICE: Mapping[str, str] = {
    "not-python": "correct the cell",
    "no-parameters": "give the cell with the settings the tag 'parameters' "
    "(in JupyterLab: the gear at the right, Cell Tags)",
    "two-parameters": "keep one such cell, and take the tag from the others",
    "undefined-name": "define it in this cell or one above",
    "out-of-order": "restart the kernel, run all cells, and save",
    "device-in-kernel": "do it inside the function that is launched, with ctx.device; "
    "nb.detect_hardware() tells what is here and touches nothing",
    "fixed-device": "use ctx.device, or let ctx.prepare or nb.fit place it",
    "built-before-launch": "make it inside the function that is launched",
    "unguarded-write": "put it under `if ctx.is_main:`, or ctx.rank into the file's name; "
    "ctx.save and ctx.log see to that themselves",
    "lone-collective": "take it out of the `if`: rank 0 alone writes and counts anyway",
    "unseeded-split": "give it a seed; nb.make_folds has one, and keeps the split with the results",
    "absolute-path": "make it a parameter, a path relative to the notebook, or a part of "
    "nb.detect_host().input, .working or .scratch",
    "unknown-ignore": "write the code of the hazard: # nb: ignore[unseeded-split]",
}
"""Every code, and what to do about it where the hazard itself says nothing better."""


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """One place that will go wrong."""

    code: str
    """Which kind: a key of :data:`ADVICE`, and what ``# nb: ignore[...]`` takes."""
    cell: int
    """The number of the code cell, from 1; 0: the notebook as a whole."""
    line: int
    """The line in the cell, from 1; 0: no line in particular."""
    what: str
    """What is wrong."""
    do: str
    """What to do now."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    def sentence(self, notebook: str) -> str:
        """As it is told: where, which kind, what; and what to do.

        Args:
            notebook: the notebook's name.
        """
        place = f", cell {self.cell}" if self.cell else ""
        place += f", line {self.line}" if self.line else ""
        return f"{notebook}{place}: {self.code}: {self.what}\n  Do now:  {self.do}"


def hazard(code: str, what: str, *, cell: int = 0, line: int = 0, do: str = "") -> Hazard:
    """A hazard; without ``do`` with the advice for its kind."""
    return Hazard(code=code, cell=cell, line=line, what=what, do=do or ADVICE[code])
