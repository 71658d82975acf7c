"""Run tests/extras/cluster with Ray: ``make test-cluster``.

    python -m tests.pythons.cluster [PYTEST ARGUMENTS]

The environment is built once, in ``build/cluster``, as that of tests/pythons/integrations.py.
"""

from __future__ import annotations

import sys

from tests.pythons.environments import ROOT
from tests.pythons.integrations import build, run_beside

FOLDER = ROOT / "build/cluster"
TESTS = ("tests/extras/cluster",)


def complete() -> None:
    """Build the environment."""
    build(FOLDER, "cluster")
    python = FOLDER / "venv/bin/python"
    # The scripts of recipes call it, and torch itself is the other Python's.
    torchrun = FOLDER / "venv/bin/torchrun"
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)


if __name__ == "__main__":
    words = sys.argv[1:] or ["-q", "-m", "cluster or not cluster", *TESTS]
    complete()
    raise SystemExit(run_beside(FOLDER, "cluster", words))
