"""Made: which runs a notebook has started, told to whoever runs the notebook, while it runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TARGET = "NBTOOLKIT_RUNS"
"""Variable that names the file to which a kernel's runs are written, a folder a line."""


def tell_made(folder: Path) -> None:
    """Say that a run, a sweep or a cross-validation has this folder; nothing where nobody asked.

    Args:
        folder: an absolute path.
    """
    if target := os.environ.get(TARGET):
        # Appended in one piece: several threads of a kernel may launch at once. The folder of the
        # file may be gone while a program that the notebook left behind goes on.
        with contextlib.suppress(FileNotFoundError), open(target, "ab") as file:
            file.write(os.fsencode(folder) + b"\n")


def read_made(file: Path) -> list[Path]:
    """The folders that were told so far, each once, oldest first.

    Args:
        file: the one that :data:`TARGET` named.
    """
    try:
        whole = file.read_bytes().split(b"\n")[:-1]  # without a line that is being written
    except FileNotFoundError:
        return []
    return [Path(os.fsdecode(line)) for line in dict.fromkeys(whole)]
