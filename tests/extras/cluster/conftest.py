"""Fixtures of clusters that the tests start on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import slurm as slurms
from login_node import login_node  # noqa: F401


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurms.Slurm]:
    if lacking := slurms.missing():
        pytest.skip(f"NOT TESTED: {lacking}")
    with slurms.running() as running:
        yield running


@pytest.fixture
def slurm_here(slurm: slurms.Slurm, monkeypatch: pytest.MonkeyPatch) -> slurms.Slurm:
    """The commands of this process find the running Slurm."""
    monkeypatch.setenv("SLURM_CONF", slurm.variables["SLURM_CONF"])
    return slurm
