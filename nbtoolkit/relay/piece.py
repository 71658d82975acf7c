"""Piece: files that are carried together or not at all, and which of them there is room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Worth = Literal["needed", "best", "values", "tracking", "other", "log", "also-ran"]

ORDER: tuple[Worth, ...] = ("needed", "best", "values", "tracking", "other", "log", "also-ran")
"""From what is never left out to what is left out first."""

SAID: dict[Worth, str] = {
    "needed": "records",
    "best": "best checkpoints of finished runs",
    "values": "return values",
    "tracking": "MLflow's database and files (nbtoolkit.tracking.replay writes them anew)",
    "other": "other files",
    "log": "output of ranks, samples and TensorBoard files",
    "also-ran": "weights of trials that did not win",
}


@dataclass(frozen=True)
class Piece:
    """Files that are carried together or not at all.

    Attributes:
        worth: how much they matter.
        run: the run they belong to; the empty text: none.
        files: their paths.
        size: bytes they take in a bundle.
    """

    worth: Worth
    run: str
    files: tuple[Path, ...]
    size: int


def choose(pieces: Iterable[Piece], room: int) -> tuple[list[Piece], list[Piece]]:
    """What is carried, and what is left out.

    Args:
        pieces: what is worth carrying.
        room: bytes there are for it.

    Returns:
        Both; what is ``needed`` is never left out, even if it does not fit.
    """
    ranked = sorted(pieces, key=lambda piece: piece.run, reverse=True)  # the newest run first
    ranked.sort(key=lambda piece: ORDER.index(piece.worth))
    kept: list[Piece] = []
    left_out: list[Piece] = []
    for piece in ranked:
        fits = piece.size <= room
        if fits or piece.worth == "needed":
            kept.append(piece)
            room -= piece.size
        else:
            left_out.append(piece)
    return kept, left_out
