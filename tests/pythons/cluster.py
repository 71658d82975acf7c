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
    "tests/search/test_trial_processes.py::test_a_trial_after_others_trains_as_a_run_of_its_own",
)


def complete() -> None:
    """Build the environment, with Horovod; where that cannot be built, its tests are skipped."""
    build(FOLDER, "cluster")
    python = FOLDER / "venv/bin/python"
    # The scripts of recipes call it, and torch itself is the other Python's.
    torchrun = FOLDER / "venv/bin/torchrun"
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
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
    complete()
    raise SystemExit(run_beside(FOLDER, "cluster", words))
