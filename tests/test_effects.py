"""Settings that had no effect, or took any value."""

from __future__ import annotations

from typing import Any

import pytest
from machines import CPU_BUILD, machine

from nbtoolkit.config import Config
from nbtoolkit.errors import SpaceError
from nbtoolkit.search.slots import make_slots
from nbtoolkit.search.wishes import load_wishes

SPACE = {"optim.lr": {"type": "float", "low": 0.1, "high": 0.9}}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"qmc_typ": "halton"}, r"qmc has no option 'qmc_typ'[\s\S]*qmc_type, scramble"),
        ({"qmc_type": "latin"}, r"qmc_type is 'latin'[\s\S]*sobol or halton"),
        ({"qmc_type": ["sobol"]}, r"qmc_type is \('sobol',\)"),
        ({"scramble": "no"}, r"scramble is 'no'[\s\S]*True or False"),
    ],
)
def test_options_that_qmc_does_not_have_are_refused(options: dict[str, Any], what: str) -> None:
    study = {"metric": "val_loss", "sampler": "qmc", "sampler_options": options}
    with pytest.raises(SpaceError, match=what):
        load_wishes({"study": study, "space": SPACE}, Config(), n_trials=2)


def test_options_that_qmc_has_are_taken() -> None:
    study = {"metric": "val_loss", "sampler": "qmc"}
    options = {"qmc_type": "halton", "scramble": False}
    wishes = {"study": {**study, "sampler_options": options}, "space": SPACE}
    assert load_wishes(wishes, Config(), n_trials=2).study.sampler_options == options


def test_trials_on_one_device_are_said_to_be_for_gpus() -> None:
    hardware = machine(build=CPU_BUILD)
    assert "for GPUs" not in make_slots(Config(), hardware, "auto").explain()
    told = make_slots(Config(), hardware, "auto", per_device=2).explain()
    assert "trials_per_device: 2 is for GPUs" in told
