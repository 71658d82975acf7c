"""Reports of sweeps whose study or configuration cannot be read."""

from __future__ import annotations

from pathlib import Path

from run_folders import write_run

from nbtoolkit.report.run_summary import read_run_summary
from nbtoolkit.report.sections import sweeps


def test_a_sweep_without_a_study_or_sweep_config_says_so_and_the_report_goes_on(
    tmp_path: Path,
) -> None:
    paths = write_run(tmp_path, "a", events=[{"type": "run"}], about={"kind": "sweep"})
    told = "".join(map(str, sweeps([read_run_summary(paths)]).parts))
    assert "Its sweep.yaml cannot be read" in told
    (paths.folder / "sweep.yaml").write_text("study: {")
    told = "".join(map(str, sweeps([read_run_summary(paths)]).parts))
    assert "Its sweep.yaml cannot be read: " in told
    assert "not valid YAML" in told
    (paths.folder / "sweep.yaml").write_text(
        "study: {name: rates, metric: val_accuracy}\nspace: {optim.lr: [0.1, 0.2]}\n"
    )
    told = "".join(map(str, sweeps([read_run_summary(paths)]).parts))
    assert "rates: 0" in told
    assert "Its plots are missing: the study study.jsonl cannot be read" in told
