"""Run tests/cluster with Ray, DeepSpeed and PostgreSQL's driver: ``make test-cluster``.

    python -m tests.pythons.cluster [PYTEST ARGUMENTS]

The environment is built once, in ``build/cluster``, as that of tests/pythons/integrations.py.
"""

from __future__ import annotations

import sys

from tests.pythons.environments import ROOT
from tests.pythons.integrations import run_beside

TESTS = ("tests/cluster", "tests/config/test_every_field_cluster.py")

if __name__ == "__main__":
    words = sys.argv[1:] or ["-q", "-m", "cluster or not cluster", *TESTS]
    raise SystemExit(run_beside(ROOT / "build/cluster", "cluster", words))
