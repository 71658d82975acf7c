"""The logged memory of a rank."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch
from feeds import contexts

from nbtoolkit.training.sync import memory_used


def test_on_the_cpu_it_is_what_is_resident_of_the_process(tmp_path: Path) -> None:
    (ctx,) = contexts(tmp_path / "run")
    gc.collect()  # what is given back meanwhile would be missing from what is held
    before = memory_used(ctx)
    assert before == pytest.approx(psutil.Process().memory_info().rss / 1e9, abs=0.02)
    held = torch.ones(50_000_000)  # 0.2 GB
    assert memory_used(ctx) - before == pytest.approx(held.nbytes / 1e9, abs=0.02)
