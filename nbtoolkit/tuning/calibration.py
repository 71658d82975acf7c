"""Measure which strategy trains fastest on this machine: one process, DDP, or DataParallel."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError, TuningError
from nbtoolkit.host import detect_host
from nbtoolkit.run.kept_answers import CALIBRATION, calibration_key, keep_answer, kept_answer
from nbtoolkit.text_table import html_columns, moment, text_columns
from nbtoolkit.tuning.probe import LoggedStep, probe

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.launcher.launch import Train

# A candidate's speed is the median of its log points after the warm-up (allocator, cuDNN's choice
# of kernels, DDP's buckets). A log point covers 5 steps: measuring each would add to a short step.
_STEPS_PER_POINT = 5
_WARM_STEPS, _WARM_SECONDS = 10, 0.3
_STEPS, _SECONDS = 20, 1.0
_LONGEST_RUN = 1_000_000  # steps; a probe ends when it has measured enough
# The fastest of two rounds counts: another program on the machine only makes a round slower.
_ROUNDS = 2
_LONG = 15.0  # seconds; candidates that take longer have one round


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One strategy, as measured.

    Attributes:
        strategy: ``single``, ``ddp`` or ``dp``.
        processes: ranks.
        samples_per_second: over all ranks; 0 if it failed.
        memory: of the rank that used the most, in GB.
        reason: why it failed, in one line; empty if it did not.
    """

    strategy: str
    processes: int
    samples_per_second: float = 0.0
    memory: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration:
    """The speed of each strategy on this machine, from :func:`calibrate`.

    Attributes:
        candidates: what was measured; the first is one process.
        batch_size: samples per optimizer step of all candidates.
        settings: those of the fastest, for ``config.with_overrides``.
        seconds: what the measurement took.
        measured: its unix time.
    """

    candidates: tuple[Candidate, ...]
    batch_size: int
    settings: Mapping[str, object]
    seconds: float
    measured: float

    @property
    def fastest(self) -> Candidate:
        """The candidate with the most samples per second."""
        return _fastest(self.candidates)

    def relative(self, candidate: Candidate) -> float | None:
        """Return a candidate's speed over that of one process; None if either failed."""
        single = self.candidates[0].samples_per_second
        return candidate.samples_per_second / single if single and not candidate.reason else None

    def __repr__(self) -> str:
        table = text_columns(_HEADER, self._rows())
        return f"{table}\n{self.summary()}"

    def _repr_html_(self) -> str:
        return f"{html_columns(_HEADER, self._rows())}<p>{self.summary()}</p>"

    def summary(self) -> str:
        """Describe the result in one line."""
        best = self.fastest
        ranks = f" ({best.processes} processes)" if best.processes > 1 else ""
        ratio = self.relative(best)
        more = "" if ratio is None or best.strategy == "single" else f", {ratio:.2f} x single"
        return (
            f"fastest: {best.strategy}{ranks}, {best.samples_per_second:,.0f} samples/s{more}, at "
            f"batch {self.batch_size}; measured {moment(self.measured)} in {self.seconds:.0f} s"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [self._row(candidate) for candidate in self.candidates]

    def _row(self, one: Candidate) -> tuple[str, ...]:
        if one.reason:
            return one.strategy, str(one.processes), "", "", "", one.reason
        ratio = self.relative(one)
        return (
            one.strategy,
            str(one.processes),
            f"{one.samples_per_second:,.0f}",
            f"{one.memory:.2f} GB",
            "" if ratio is None else f"{ratio:.2f}",
            "fastest" if one is self.fastest else "",
        )


_HEADER = ("strategy", "processes", "samples/s", "memory", "relative to single", "")


def calibrate(train: Train, config: ConfigLike = None, *, force: bool = False) -> Calibration:
    """Measure how fast one process, DDP and DataParallel train on this machine; nothing is guessed.

    Each candidate trains for 20 steps or a second after its warm-up, whichever is longer, in runs
    that leave nothing behind, at the global batch size of ``config``: one process on one device (on
    the CPU: all CPUs), DDP on all usable devices (on the CPU: two ranks, or
    ``distributed.world_size``), and with several equal GPUs DataParallel. A candidate that fails is
    a row of the table with its reason.

    The result is kept in ``<output_dir>/tuning.json`` by function, model and devices. Launches with
    ``distributed.strategy: auto`` then use a strategy that is more than 5% faster than the usual
    one, sweeps choose their placement by it, and :attr:`RunResult.efficiency` refers to it.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit`.
        config: the configuration of the run to come.
        force: measure again, even if a result was kept.

    Raises:
        TuningError: no candidate could be measured, or the function does no step of ``fit``.
        Exception: the function's own, if it fails on one device as well.
    """
    config = as_config(config)
    key, planned = calibration_key(train, config), _planned(config)
    kept = None if force else kept_answer(config, CALIBRATION, key)
    if kept is not None:
        result = _read(config, kept)
        if [one.processes for one in result.candidates] == [one.processes for one in planned]:
            print(f"calibrate: kept: {result.summary()}")
            return result
    result = _measured(train, config, key, planned)
    print(f"calibrate: {result.summary()}")
    return result


def calibrate_within(train: Train, config: Config, seconds: float) -> str:
    """Measure and keep what :func:`calibrate` does, in one round; return the result in a line.

    Args:
        train: see there.
        config: see there.
        seconds: no candidate starts if it would probably end later.

    Raises:
        TuningError: DDP, or everything else, could not be measured in this time.
        Exception: the function's own.
    """
    planned = _planned(config)
    return _measured(train, config, calibration_key(train, config), planned, seconds).summary()


def _measured(
    train: Train,
    config: Config,
    key: str,
    planned: list[Candidate],
    seconds: float | None = None,
) -> Calibration:
    began = time.monotonic()
    candidates = _measure_all(train, config, planned, seconds)
    answer: dict[str, Any] = {
        "candidates": [asdict(candidate) for candidate in candidates],
        "batch_size": _batch(config).global_batch_size,
        "seconds": round(time.monotonic() - began, 1),
    }
    keep_answer(config, CALIBRATION, key, answer)
    return _read(config, {**answer, "measured": time.time()})


def measured_strategy(train: Train, config: Config) -> tuple[dict[str, Any], str]:
    """Return the settings that replace ``distributed.strategy: measured``, and why."""
    ranks = config.distributed
    if ranks.enabled != "auto" or ranks.world_size != "auto":
        return {"distributed.strategy": "auto"}, "other settings decide the number of ranks"
    return dict(calibrate(train, config).settings), "by nb.calibrate"


def _read(config: Config, answer: Mapping[str, Any]) -> Calibration:
    candidates = tuple(Candidate(**row) for row in answer["candidates"])
    return Calibration(
        candidates=candidates,
        batch_size=answer["batch_size"],
        settings=_distributed(config, _fastest(candidates).strategy),
        seconds=answer["seconds"],
        measured=answer["measured"],
    )


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    return max(candidates, key=lambda one: one.samples_per_second)


# --- candidates ---


def _planned(config: Config) -> list[Candidate]:
    """Return the candidates of this machine, not measured yet; one without a plan has a reason."""
    hardware, ranks = detect_hardware(), config.distributed.world_size
    gpus = len(hardware.usable)
    strategies = ["single"]
    if gpus > 1 or (not gpus and hardware.cpu_count > 1) or ranks not in ("auto", 1):
        strategies.append("ddp")
    if gpus > 1:
        strategies.append("dp")
    found = []
    for strategy in strategies:
        try:
            overrides = _overrides(config, strategy)
            plan = make_plan(config.with_overrides(overrides), detect_host(), hardware)
        except NbtoolkitError as error:
            found.append(Candidate(strategy=strategy, processes=1, reason=_line(error)))
            continue
        if plan.strategy == strategy:  # unequal GPUs form no group
            found.append(Candidate(strategy=strategy, processes=plan.processes))
    return found


def _overrides(config: Config, strategy: str) -> dict[str, object]:
    """Return the settings of a candidate, at the global batch size of the run."""
    settings = _distributed(config, strategy)
    if config.train.batch_size_per_device is None:
        return settings
    plan = _batch(config)
    passes = plan.accumulate * (plan.processes if strategy == "single" else 1)
    return {
        **settings,
        "train.batch_size": plan.global_batch_size,
        "train.batch_size_per_device": None,
        "train.gradient_accumulation_steps": passes,
        "optim.lr_rule": "none",
    }


def _distributed(config: Config, strategy: str) -> dict[str, object]:
    ranks = config.distributed.world_size
    return {
        "distributed.enabled": "auto",
        "distributed.strategy": strategy,
        "distributed.world_size": ranks if strategy == "ddp" and ranks != 1 else "auto",
    }


def _batch(config: Config) -> LaunchPlan:
    """Return the plan whose batch all candidates have: that of the run if nothing is measured."""
    usual = config.with_overrides({"distributed.strategy": "auto", "distributed.enabled": "auto"})
    return make_plan(usual, detect_host(), detect_hardware())


def _measure_all(
    train: Train, config: Config, planned: list[Candidate], seconds: float | None
) -> list[Candidate]:
    """Measure all candidates in turn, twice if that is quick and ``seconds`` is None."""
    found, errors = list(planned), list[Exception]()
    # DDP first: without its speed the others say nothing.
    order = sorted(range(len(found)), key=lambda at: found[at].strategy != "ddp")
    longest = 0.0
    for _ in range(_ROUNDS if seconds is None else 1):
        began = time.monotonic()
        for at in order:
            before, start = found[at], time.monotonic()
            if before.reason:
                continue
            if seconds is not None and start - began + longest > seconds:
                found[at] = replace(before, reason=f"not measured: {seconds:g} s are over")
                continue
            try:
                now = _measure(train, config, before)
            except TuningError:
                raise
            except Exception as error:  # of the user's function, or of the ranks' group
                errors.append(error)
                now = replace(before, samples_per_second=0.0, reason=_line(error))
            if now.reason or now.samples_per_second > before.samples_per_second:
                found[at] = now
            longest = max(longest, time.monotonic() - start)
        if time.monotonic() - began > _LONG * len(found):
            break
    measured = [one for one in found if not one.reason]
    if len(measured) > (seconds is not None):
        return found
    if errors:
        raise errors[0]
    raise TuningError(
        "no strategy could be measured: "
        + "; ".join(f"{one.strategy}: {one.reason}" for one in found),
        allowed="a function of which at least one process can do some steps",
        do="launch it with distributed.strategy: single, and correct what the error reports",
    )


def _measure(train: Train, config: Config, candidate: Candidate) -> Candidate:
    """Return the candidate with what a probe has shown."""
    overrides = _overrides(config, candidate.strategy)
    meter = _Meter(_STEPS_PER_POINT * _batch(config).global_batch_size)
    overrides["tracking.log_every_n_steps"] = _STEPS_PER_POINT
    found = probe(train, config, overrides, steps=_LONGEST_RUN, on_step=meter)
    if found.status != "measured":
        return replace(candidate, samples_per_second=0.0, reason=found.reason)
    # A probe that ends sooner (train.max_steps of the function's own) has no warm-up.
    rates = meter.rates or [step.samples for step in found.steps]
    return replace(candidate, samples_per_second=median(rates), memory=found.memory)


class _Meter:
    """Collects the samples per second of a probe's log points after its warm-up.

    Args:
        samples: of a log point.
    """

    def __init__(self, samples: int) -> None:
        self._samples, self._points, self._seconds = samples, 0, 0.0
        self.rates: list[float] = []

    def __call__(self, step: LoggedStep) -> bool:
        """Add a log point; returns whether it was the last one that is needed."""
        if self._points * _STEPS_PER_POINT >= _WARM_STEPS and self._seconds >= _WARM_SECONDS:
            self.rates.append(step.samples)
        self._points += 1
        self._seconds += self._samples / step.samples
        steps = len(self.rates) * _STEPS_PER_POINT
        return steps >= _STEPS and self._seconds >= _WARM_SECONDS + _SECONDS


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
