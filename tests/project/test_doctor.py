"""nb.doctor(): a report of the environment, its known faults, and whether forks work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.doctor import known_bad
from nbtoolkit.environment.fork_diagnosis import (
    Inconclusive,
    find_breaking_import,
    suspicious_cells,
)

USED_OPENMP = """
import torch
torch.set_num_threads(2)
(torch.ones(900, 900) @ torch.ones(900, 900)).exp()
import nbtoolkit as nb
print(nb.doctor())
"""


@pytest.mark.long
def test_report_says_what_is_here() -> None:
    report = nb.doctor()
    text = report.explain()
    here = (report.host.kind, "session", report.session, "room", report.room, "hardware")
    for part in (*here, "plan", "torch", "accelerate", "fork-safe"):
        assert part in text
        assert part in report._repr_html_()
    assert report.plan is not None
    assert " old; no limit is set" in report.session or "must end" in report.session
    assert f"{report.host.working}: " in report.room
    assert report.room.endswith(" free")


@pytest.mark.long
def test_a_process_that_computed_in_parallel_is_not_fork_safe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", USED_OPENMP], capture_output=True, text=True, timeout=240, check=True
    )
    assert "fork-safe no: a forked child hung" in done.stdout
    assert "no import is the cause" in done.stdout


def test_a_fresh_process_is_fork_safe() -> None:
    code = "import nbtoolkit as nb; r = nb.doctor(); print(r.fork.ok, repr(r.cause))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "True ''"


@pytest.mark.long
def test_the_import_that_breaks_forks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "computes_at_import.py").write_text(
        "import torch\ntorch.set_num_threads(2)\nx = torch.ones(900, 900)\n(x @ x).exp()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        find_breaking_import(["json", "computes_at_import", "csv"], device=False)
        == "computes_at_import"
    )
    assert find_breaking_import(["json"], device=False) is None


def test_nobody_is_named_where_a_fresh_interpreter_fails_the_probe_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.register_at_fork(after_in_child=lambda: os._exit(1))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Inconclusive, match="without any of them is not fork-safe"):
        find_breaking_import(["json", "csv"], device=False)


@pytest.mark.long
def test_nobody_is_named_where_two_tries_disagree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a probe does on a loaded machine: here forks fail after the first import only."""
    (tmp_path / "sometimes.py").write_text(
        f"import os\ntries = {str(tmp_path / 'tries')!r}\n"
        "open(tries, 'a').write('x')\n"
        "if os.path.getsize(tries) < 2: os.register_at_fork(after_in_child=lambda: os._exit(1))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Inconclusive, match="two tries with `import sometimes` disagree"):
        find_breaking_import(["json", "sometimes"], device=False)


def test_nobody_is_named_where_the_time_is_too_short() -> None:
    with pytest.raises(Inconclusive, match="took too long"):
        find_breaking_import(["json"], device=False, limit=0.0)


SLOW_CHILD = """
import time, torch
from nbtoolkit.environment.fork_diagnosis import probe_fork
ones = torch.ones
def slow_ones(*size, **options):
    end = time.process_time() + 1.5
    while time.process_time() < end: pass
    return ones(*size, **options)
torch.ones = slow_ones
print(probe_fork(device=False, seconds=1.0))
"""


@pytest.mark.long
def test_a_slow_child_is_not_a_broken_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW_CHILD], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("ProbeResult(ok=True")


@pytest.mark.parametrize(
    ("cell", "suspect"),
    [
        ("x = torch.randn(3).cuda()", True),
        ("a @ b", True),
        ("model.to('cuda')", True),
        ("accelerator = Accelerator()", True),
        ("def train(config, ctx):\n    return a @ b", False),
        ("%matplotlib inline\nimport torch", False),
        ("this is not python", False),
    ],
)
def test_cells_that_compute_at_top_level_are_suspects(cell: str, suspect: bool) -> None:
    assert suspicious_cells({7: cell}) == ([7] if suspect else [])


def _launchers(folder: Path, source: str) -> dict[str, Path]:
    (folder / "accelerate").mkdir()
    (folder / "accelerate" / "launchers.py").write_text(source)
    (folder / "torch" / "numa").mkdir(parents=True)
    (folder / "torch" / "numa" / "binding.py").touch()
    return {"accelerate": folder / "accelerate", "torch": folder / "torch"}


def test_known_bad_numa_binding(tmp_path: Path) -> None:
    broken = _launchers(
        tmp_path, "launch_config_kwargs['numa_options'] = NumaOptions(AffinityMode.NODE)"
    )
    (sentence,) = known_bad({"torch": "2.13.0"}.get, broken)
    assert "accelerate#3925" in sentence
    (tmp_path / "accelerate" / "launchers.py").write_text(
        "numa_options = ...; launch_config.numa_options = None"
    )
    assert known_bad({"torch": "2.13.0"}.get, broken) == []


def test_known_bad_versions() -> None:
    (torchao,) = known_bad({"accelerate": "1.6.0", "torchao": "0.9", "torch": "2.6.0"}.get, {})
    assert "accelerate#3524" in torchao
    (old,) = known_bad({"torch": "2.5.1+cu121"}.get, {})
    assert "older than 2.6" in old


def test_a_strangers_package_of_the_same_name_is_noticed() -> None:
    (stranger,) = known_bad({"nbtoolkit": "0.1.1", "torch": "2.13.0"}.get, {})
    assert "pip uninstall nbtoolkit, and install this one again" in stranger


def test_no_install_line_brings_a_strangers_package() -> None:
    root = Path(nb.__file__).parent.parent
    files = [root / "README.md", root / "pyproject.toml", *(root / "docs").rglob("*.md")]
    files += [*(root / "notebooks").glob("*.ipynb"), *(root / "nbtoolkit").rglob("*.py")]
    strangers = re.compile(r"nbtoolkit\[|pip install (-U )?['\"]?nbtoolkit\b(?!-torch)")
    assert [file.name for file in files if strangers.search(file.read_text())] == []


def test_what_is_installed_here_has_no_known_bad_pair() -> None:
    assert known_bad() == []
