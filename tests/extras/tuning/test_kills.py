"""A kernel killed in the middle of a finder: no process, run or answer is left, and no folder."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from kernels import all_gone, descendants, script, until

import nbtoolkit as nb
from nbtoolkit.extras.tuning.answer import Subject
from nbtoolkit.extras.tuning.probe import probe
from nbtoolkit.tasks import digits

MIDDLE = """
import time
from pathlib import Path
import nbtoolkit as nb
from torch import nn
from fits import configured, model_of, samples

def train(config, ctx):
    def step(model, batch):
        Path("steps").touch()
        time.sleep(0.2)
        return model(batch[0]), batch[1]

    loss = nn.functional.cross_entropy
    return nb.fit(ctx, config, model_of(), samples(400), None, loss=loss, step=step)

config = configured(overrides={"runtime.output_dir": "out"})
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        "nb.find_batch_size(train, config)",
        "nb.find_learning_rate(train, config)",
        "nb.calibrate(train, config)",
        "nb.compare(train, config, [{}])",
        'nb.benchmark(train, config, sections=["scaling"])',
    ],
)
def test_a_kill_in_the_middle_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with script(MIDDLE + call, tmp_path, TMPDIR=str(scratch)) as running:
        until(lambda: (tmp_path / "steps").exists(), "a step of the measurement")
        family = descendants(running.pid)
        assert len(family) >= 3  # fork server, supervisor, agent, ranks
        os.kill(running.pid, signal.SIGKILL)
    all_gone(family)
    assert not (tmp_path / "out").exists()
    assert [*scratch.glob("nbtoolkit-*")], "what the next measurement has to remove"
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    config = nb.load_config(env=None, overrides={"train.batch_size": 512})
    assert probe(Subject(digits.train, config), {}, steps=2).status == "measured"
    assert not [*scratch.glob("nbtoolkit-*")]
