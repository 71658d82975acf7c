"""nb.doctor(): a report of the environment and its known faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.doctor import known_bad


@pytest.mark.long
def test_report_says_what_is_here() -> None:
    report = nb.doctor()
    text = report.explain()
    here = (report.host.kind, "session", report.session, "room", report.room, "hardware")
    for part in (*here, "plan", "torch", "accelerate"):
        assert part in text
        assert part in report._repr_html_()
    assert report.plan is not None
    assert " old; no limit is set" in report.session or "must end" in report.session
    assert f"{report.host.working}: " in report.room
    assert report.room.endswith(" free")


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
