"""The fork server imports what launches need, and nothing that touches a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kernels import SECONDS

from nbtoolkit.launcher.forkserver_client import ForkServerClient

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from nbtoolkit.launcher.preload import preload
preload()
assert "accelerate" in sys.modules
print("touched" if "torchao" in sys.modules else "clean")
import torchao
"""


def test_packages_that_touch_devices_are_not_imported_but_stay_importable(tmp_path: Path) -> None:
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("print('imported')\n")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout.split() == ["clean", "imported"]


def test_a_fork_server_takes_more_names_than_fit_into_an_argument() -> None:
    """An argument has at most 128 KiB. Modules that are not there are left to the ranks."""
    server = ForkServerClient([f"not_installed.{'part_' * 20}{number}" for number in range(2000)])
    try:
        server.wait_until_ready()
    finally:
        server.disconnect()
        server.wait_for_end(stalled=20.0)
