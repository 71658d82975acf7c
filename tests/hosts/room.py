"""Run a command as on a host: its variables, folders and environment, without internet."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from names import VARIABLES, WORKING

# Kept from outside: where programs are, and the mark of a test's processes.
_PASSED = ("PATH", "LANG", "NBTOOLKIT_TEST_FAMILY")


@dataclass(frozen=True, kw_only=True)
class Room:
    """One session on a host."""

    host: str
    venv: Path
    """The host's image; the session's changes of it are not kept."""
    wheels: Path
    """A folder made by ``nbtoolkit bundle``, attached."""
    folder: Path
    """Empty, for the room's own use."""

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a shell's script in the working folder; what is there at the end is in ``results``.

        ``$PYTHON`` is the image's Python. Needs user namespaces, and overlays in them (Linux 6.6).
        """
        for name in ("new", "results"):
            (self.folder / name).mkdir()
        room = ["bash", str(Path(__file__).with_name("room.sh")), str(self.folder / "new")]
        places = [str(self.venv), str(self.wheels), WORKING[self.host], str(self.results)]
        alone = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
        return subprocess.run(
            [*alone, *room, *places, "bash", "-ec", script],
            env=self._environ(),
            capture_output=True,
            text=True,
            timeout=1700,
        )

    @property
    def results(self) -> Path:
        """What was in the working folder at the end."""
        return self.folder / "results"

    def _environ(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        programs = self.venv / "bin"
        passed["PATH"] = f"{programs}:{passed['PATH']}"
        return {**passed, **VARIABLES[self.host], "PYTHON": str(programs / "python")}
