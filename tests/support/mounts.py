"""Scripts in a mount namespace, where a disk is full or read-only."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import SECONDS, START


def in_own_mounts(
    code: str, home: Path, *, mode: str = "rw", at: str = "out", size: str = "2m"
) -> list[str]:
    """Run ``code`` where ``at`` is a small file system, in a mount namespace; its lines."""
    unshare = [shutil.which("unshare") or "unshare", "-rm"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace (unshare -rm), which this machine does not allow")
    (home / at).mkdir(exist_ok=True)
    (home / "mounted.py").write_text(START + code)
    mount = f"mount -t tmpfs -o size={size},{mode} tmpfs {at}"
    done = subprocess.run(
        [*unshare, "sh", "-c", f"{mount} && exec {shlex.quote(sys.executable)} mounted.py"],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
