"""The time left of sweeps that prune, on simulated sweeps whose end is known."""

from __future__ import annotations

import heapq
import math
import random
import statistics

import optuna
import pytest

from nbtoolkit.run.events import Event, IntermediateReported, TrialChanged
from nbtoolkit.study.table import SweepTable

EPOCHS = 12


def simulated(seed: int, trials: int, parameters: int) -> list[Event]:
    """What a sweep of two slots writes: Optuna's sampler and median rule, a clock of ours."""
    draw = random.Random(seed)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner())
    unit = optuna.distributions.FloatDistribution(0.0, 1.0)
    events: list[Event] = []
    clock: list[tuple[float, int, int]] = []
    running: dict[int, tuple[optuna.Trial, float, float]] = {}

    def begin(now: float) -> None:
        trial = study.ask({f"q{index}": unit for index in range(parameters)})
        seconds = draw.uniform(0.8, 1.2) * (1 + trial.params["q0"])  # per epoch
        running[trial.number] = (trial, now, seconds)
        events.append(TrialChanged(t=now, number=trial.number, state="running"))
        heapq.heappush(clock, (now + seconds, trial.number, 1))

    begin(0.0)
    begin(0.0)
    while clock:
        now, number, step = heapq.heappop(clock)
        trial, start, seconds = running[number]
        distance = sum((value - 0.3) ** 2 for value in trial.params.values())
        value = distance + math.exp(-step / 3) + draw.gauss(0, 0.05)
        trial.report(value, step - 1)
        events.append(IntermediateReported(t=now, number=number, step=step, value=value))
        pruned = trial.should_prune()
        if not pruned and step < EPOCHS:
            heapq.heappush(clock, (now + seconds, number, step + 1))
            continue
        study.tell(
            trial,
            None if pruned else value,
            state=optuna.trial.TrialState.PRUNED if pruned else None,
        )
        state = "pruned" if pruned else "complete"
        events.append(TrialChanged(t=now, number=number, state=state, seconds=now - start))
        if len(study.trials) < trials:
            begin(now)
    return events


def error(events: list[Event], trials: int, share: float) -> float:
    """How much too long the time left is, when a share of the trials has ended."""
    ends = [at for at, one in enumerate(events) if isinstance(one, TrialChanged) and one.seconds]
    at = ends[math.ceil(share * trials) - 1] + 2  # its slot has the next trial
    table = SweepTable(directions=["minimize"], n_trials=trials, unpruned=5)
    table.read(events[:at])
    now, end = events[at - 1].t, table.ends_at(events[at - 1].t)
    assert end is not None
    return (end - now) / (events[-1].t - now) - 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_at_a_quarter_of_a_pruned_sweep_the_time_left_is_within_a_third() -> None:
    """By the median of 36 sweeps of 20 to 60 trials; a few easy ones end in half the time."""
    sweeps = {
        (trials, parameters, seed): simulated(seed, trials, parameters)
        for trials in (20, 40, 60)
        for parameters in (1, 4)
        for seed in range(6)
    }
    for share in (0.25, 0.5):
        wrong = [error(events, key[0], share) for key, events in sweeps.items()]
        assert statistics.median(map(abs, wrong)) < 0.33
        assert abs(statistics.median(wrong)) < 0.25
