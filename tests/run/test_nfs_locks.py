"""Locks of an output folder on NFS: a session under the flock of Linux's NFS client.

The machine's kernel has no NFS. What differs there for locks is known, and preloaded into real
processes; see tests/support/nfs_flock.c.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
TOLD = {
    "folders": ["Bad file descriptor"],
    "owned": ["True True", "False"],
    "tracked": ["True"],
    "resumed": ["True completed"],
    "trials": ["['complete', 'complete']"],
    "unpacked": ["2"],
    "left": ["['nbtoolkit-relay.bundle']"],
}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="NOT TESTED: gcc is not installed")
def test_a_session_on_nfs(tmp_path: Path) -> None:
    library = tmp_path / "nfs_flock.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, SUPPORT / "nfs_flock.c"], check=True, timeout=60
    )
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    done = subprocess.run(
        [sys.executable, SUPPORT / "nfs_session.py", outputs],
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.split(":")[0] in TOLD]
    assert told == [f"{name}: {what}" for name, whats in TOLD.items() for what in whats]
