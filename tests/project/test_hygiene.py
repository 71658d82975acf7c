"""The checks of conftest.py detect each kind of leak."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKS = """
import os, socket, subprocess, tempfile, threading

kept = []

def test_process():
    kept.append(subprocess.Popen(["sleep", "600"]))

def test_detached_process():
    subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"], check=True)

def test_thread():
    end = threading.Event()
    kept.append(end)
    threading.Thread(target=end.wait).start()

def test_thread_of_the_test_before_is_not_blamed():
    kept.pop().set()

def test_variable():
    os.environ["LEFT"] = "1"

def test_directory(tmp_path):
    os.chdir(tmp_path)

def test_folder():
    kept.append(tempfile.TemporaryDirectory(prefix="nbtoolkit-"))

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_that_ends_what_it_began(monkeypatch, tmp_path):
    kept.clear()
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)
    subprocess.run(["true"], check=True)
"""


def load_checks() -> ModuleType:
    # By its path: where tests/browser is collected, too, ``import conftest`` may find that one's.
    spec = spec_from_file_location("checks", CONFTEST)
    assert spec is not None
    assert spec.loader is not None
    checks = module_from_spec(spec)
    spec.loader.exec_module(checks)
    checks.FOREIGN.update(checks._all_processes())
    return checks


def test_a_process_that_has_just_been_detached_is_seen() -> None:
    # One look in a hundred came while it had neither its old variables nor its new ones.
    checks = load_checks()
    detach = ["sh", "-c", "setsid sleep 0.3 >/dev/null 2>&1 &"]
    for _ in range(200):
        before = checks._processes()
        subprocess.run(detach, check=True)
        assert checks._processes() - before


def test_what_a_test_leaves_behind_fails_it_and_only_it(tmp_path: Path) -> None:
    hasty, changed = re.subn(r"(?m)^GRACE = .*$", "GRACE = 0.5", CONFTEST.read_text())
    assert changed == 1
    (tmp_path / "conftest.py").write_text(hasty)
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rE", "."]
    environ = {**os.environ, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        program, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert [line.split("::")[1].split()[0] for line in lines] == [
        "test_process",
        "test_detached_process",
        "test_thread",
        "test_variable",
        "test_directory",
        "test_folder",
        "test_port",
    ], done.stdout
