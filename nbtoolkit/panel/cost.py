"""Say where the settings of a form run, and what a search with them costs."""

from __future__ import annotations

import math
from statistics import fmean

from nbtoolkit.config.schema import Config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.host import COUNTS_SESSIONS, detect_host
from nbtoolkit.panel.form import Validation
from nbtoolkit.search.slots import Placement, make_slots
from nbtoolkit.text_table import counted, gib
from nbtoolkit.views.state import WORKED, State


def place_text(validation: Validation) -> str:
    """Say on what a launch and a sweep will run; for a refused plan, the reason."""
    if validation.config is None:
        return "plan: something in Set up is wrong"
    hardware = detect_hardware()
    slots = ""
    if validation.sweep_config is not None:
        slots = f" · sweep: {counted(count_slots(validation)[0], 'slot')}"
    try:
        plan = make_plan(validation.config, detect_host(), hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        return f"plan: refused: {error}"
    machine = f"{counted(hardware.cpu_count, 'CPU')}, {gib(hardware.memory)}"
    return f"{plan.partition(', batch')[0]}{slots} · {machine}"


def count_slots(validation: Validation) -> tuple[int, int]:
    """Count the trainings of a search that run at a time, and the GPUs of each of them."""
    config = validation.config
    sweep = validation.sweep_config
    if config is None:
        return 1, 0
    placement: Placement = "auto" if sweep is None else sweep.placement
    per_device = 1 if sweep is None else sweep.trials_per_device
    slots = make_slots(config, detect_hardware(), placement, per_device=per_device).slots
    return len(slots), len(slots[0].hardware.usable)


def training_seconds(state: State | None) -> float | None:
    """Return how long a training of the watched run takes, on average; None: unknown."""
    if state is None:
        return None
    if state.kind == "run":
        return state.elapsed() if state.status == "completed" else None
    spans = [span for span in state.spans(WORKED) if span.state == "complete"]
    seconds = [span.end - span.begin for span in spans if span.end is not None]
    return fmean(seconds) if seconds else None


def cost_text(
    validation: Validation,
    seconds_per_training: float | None = None,
    slots: int = 1,
    folds: int | None = None,
    devices: int = 0,
) -> str:
    """Describe what a sweep or a cross-validation costs.

    Args:
        validation: of the form.
        seconds_per_training: how long one training takes; None: unknown.
        slots: how many trainings run at a time.
        folds: the number of folds; None: as the sweep says.
        devices: the number of GPUs of one training.

    Returns:
        Such as ``"20 trials x 3 folds = 60 trainings, about 9 min on 2 slots"``, and with
        ``runtime.quota_hours`` the share of the quota; empty: it is one training, or the number of
        trials is unknown.
    """
    sweep = validation.sweep_config
    counts = []
    if sweep is not None:
        folds = folds or (sweep.folds.k or 0) * sweep.folds.repeats
        counts.append((sweep.budget.n_trials or 0, "trial"))
    if folds:
        counts.append((folds, "fold"))
    trainings = math.prod(count for count, _ in counts) if counts else 0
    if not trainings:
        return ""
    text = " x ".join(counted(count, noun) for count, noun in counts)
    text += f" = {counted(trainings, 'training')}" if folds else ""
    if seconds_per_training is None:
        return text
    seconds = seconds_per_training * math.ceil(trainings / slots)
    text += f", about {_rounded(seconds)} on {counted(slots, 'slot')}"
    if validation.config is None:
        return text
    quota = quota_cost(
        validation.config,
        detect_host().kind,
        jobs=trainings,
        seconds=seconds_per_training,
        slots=slots,
        devices=devices,
    )
    return f"{text}: {quota}" if quota else text


def quota_cost(
    config: Config, host: str, *, jobs: int, seconds: float, slots: int, devices: int
) -> str:
    """Say what a search costs of a quota; empty without ``runtime.quota_hours``.

    Args:
        config: the configuration.
        host: the kind of host.
        jobs: trainings.
        seconds: of one training.
        slots: trainings at a time.
        devices: GPUs of each training.
    """
    limit = config.runtime.quota_hours
    if limit is None:
        return ""
    if host in COUNTS_SESSIONS:
        turns = math.ceil(jobs / slots)
        counted_devices = min(1, devices)
    else:
        turns = jobs
        counted_devices = devices
    hours = turns * counted_devices * seconds / 3600
    return f"about {hours:.3g} of your {limit:.3g} GPU hours"


def _rounded(seconds: float) -> str:
    """Format a length of time that is not known exactly."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
