"""Run tests/cluster with Ray, DeepSpeed, Horovod and PostgreSQL's driver: ``make test-cluster``.

    python -m tests.pythons.cluster [PYTEST ARGUMENTS]

The environment is built once, in ``build/cluster``, as that of tests/pythons/integrations.py.
"""

from __future__ import annotations

import subprocess
import sys

from tests.pythons.environments import ROOT, run_uv
from tests.pythons.integrations import build, run_beside

FOLDER = ROOT / "build/cluster"
TESTS = (
    "tests/cluster",
    "tests/config/test_every_field_cluster.py",
)


def add_horovod() -> None:
    """Build Horovod into the environment; where that fails its tests are skipped, loudly."""
    build(FOLDER, "cluster")
    python = FOLDER / "venv/bin/python"
    there = subprocess.run([python, "-c", "import horovod.torch"], capture_output=True, check=False)
    if there.returncode == 0:
        return
    print("building Horovod (minutes the first time)", flush=True)
    run_uv("pip", "install", "--python", python, "pip", "cloudpickle", "psutil", "packaging")
    script, folder = ROOT / "tests/cluster/build_horovod.sh", FOLDER / "horovod"
    if subprocess.run([script, python, folder], check=False).returncode:
        print("HOROVOD COULD NOT BE BUILT: ITS TESTS ARE SKIPPED", file=sys.stderr, flush=True)


if __name__ == "__main__":
    words = sys.argv[1:] or ["-q", "-m", "cluster or not cluster", *TESTS]
    add_horovod()
    raise SystemExit(run_beside(FOLDER, "cluster", words))
