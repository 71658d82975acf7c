"""Stand-ins for a cluster's commands, where a test is about what we give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs with the names of Slurm's, in place of those of a login node: sbatch keeps its
    arguments in the file ``submitted``, and each job waits for ever."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "sbatch": f'printf "%s\\n" "$@" > {tmp_path}/submitted; echo 7',
        "squeue": "echo 'PENDING|Resources'",
        "scancel": f"echo $1 > {tmp_path}/cancelled",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path
