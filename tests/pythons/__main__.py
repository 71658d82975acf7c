"""Run every notebook and the quick suite in each environment: ``make test-pythons``.

    python -m tests.pythons [NAME ...]

Prints the table of docs/log.md, and fails if an environment fails. The output of each is in
``build/pythons/NAME``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat

from nbtoolkit.notebooks.document import read_as_saved, with_parameters
from tests.notebook_sizes import NOTEBOOKS
from tests.notebook_sizes import QUICK as QUICK_SIZES
from tests.pythons.environments import ENVIRONMENTS, ROOT, Environment, build

QUICK = "not long and not apart and not hosts and not gpu and not cluster"
# Warnings of an environment's own packages, which its user sees without us too.
EXCUSED = {
    # jupyter_client 7.4 on Python 3.13, in Colab's image
    "3.13-colab": ["Parsing dates involving a day of month without a year"],
    # typer before 0.26 with click 8.5
    "3.10-lowest": ["'click.utils."],
}

IMPORTS = """
import importlib, pkgutil
import nbtoolkit
from nbtoolkit.errors import MissingExtra
for found in pkgutil.walk_packages(nbtoolkit.__path__, "nbtoolkit."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except MissingExtra:  # a framework that the environment does not have
            if not found.name.startswith("nbtoolkit.extras.integrations."):
                raise
"""

VERSIONS = """
from importlib.metadata import version
names = ("torch", "accelerate", "optuna", "mlflow", "pydantic", "numpy", "ipywidgets", "nbclient")
print(", ".join(f"{name} {version(name)}" for name in names))
"""


def main(names: list[str]) -> int:
    """Run those that are named, or all."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    if unknown := set(names) - set(known):
        print(f"no such environment: {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    rows = [run(known[name]) for name in names or known]
    head = ["environment", "versions", "imports", "notebooks", "quick suite", ""]
    for cells in (head, ["---"] * len(head), *(cells for cells, _ in rows)):
        print(f"| {' | '.join(cells)} |")
    return 0 if all(passed for _, passed in rows) else 1


def run(environment: Environment) -> tuple[list[str], bool]:
    """The cells of its row, and whether all of it passed."""
    print(f"{environment.name}: installing", flush=True)
    build(environment)
    began = time.monotonic()
    versions = _python(environment, "-c", VERSIONS, log="versions.log")[1].strip()
    imports = _imports(environment)
    print(f"{environment.name}: notebooks", flush=True)
    notebooks = _notebooks(environment)
    print(f"{environment.name}: quick suite", flush=True)
    suite = _pytest(environment, "suite.log", "-m", QUICK)
    minutes = f"{(time.monotonic() - began) / 60:.0f} min"
    told = [text for _, text in (imports, notebooks, suite)]
    print(f"{environment.name}: {'; '.join(told)}", flush=True)
    passed = all(ok for ok, _ in (imports, notebooks, suite))
    return [environment.name, versions, *told, minutes], passed


def _imports(environment: Environment) -> tuple[bool, str]:
    """Import every module; a warning is an error."""
    excused = [
        word for text in EXCUSED.get(environment.name, ()) for word in ("-W", f"ignore:{text}")
    ]
    code, _ = _python(environment, "-W", "error", *excused, "-c", IMPORTS, log="imports.log")
    return code == 0, "no warning" if code == 0 else "a warning or an error: imports.log"


def _notebooks(environment: Environment) -> tuple[bool, str]:
    """Run each in its quick size, as ``nbtoolkit run`` does it for a user."""
    folder = environment.folder / "notebooks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    failed = []
    for path in NOTEBOOKS:
        copy = folder / path.name
        nbformat.write(with_parameters(read_as_saved(path), QUICK_SIZES.get(path.stem, {})), copy)
        words = ["-m", "nbtoolkit", "run", path.name, "--output", f"{path.stem}-done.ipynb"]
        if _python(environment, *words, log=f"notebooks/{path.stem}.log", cwd=folder)[0]:
            failed.append(path.stem)
    done = f"{len(NOTEBOOKS) - len(failed)} of {len(NOTEBOOKS)}"
    return not failed, f"{done}; failed: {', '.join(failed)}" if failed else done


def _pytest(environment: Environment, log: str, *words: str) -> tuple[bool, str]:
    """Run tests. Warnings of packages in versions that are not ours are none of these tests."""
    fixed = ["-q", "-n", "3", "--dist", "loadscope", "-o", "filterwarnings=default"]
    # anyio's plugin of an older version warns of pytest's names before there is a filter
    fixed += ["-p", "no:cacheprovider", "-p", "no:anyio"]
    code, text = _python(environment, "-m", "pytest", *fixed, *words, log=log)
    ends = re.findall(r"^(\d+ (?:passed|failed).*?) in ", text, re.MULTILINE)
    return code == 0, re.sub(r", \d+ warnings?", "", ends[-1]) if ends else f"no end: {log}"


def _python(environment: Environment, *words: str, log: str, cwd: Path = ROOT) -> tuple[int, str]:
    done = subprocess.run(
        [environment.interpreter, *words],
        cwd=cwd,
        env={
            **os.environ,
            # a list of fonts that one environment has made is read by all of its version
            "MPLCONFIGDIR": str(environment.folder / "matplotlib"),
            # torch 2.6 starts processes wherever its compiler is imported, which end a moment later
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    Path(environment.folder / log).write_text(done.stdout)
    return done.returncode, done.stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
