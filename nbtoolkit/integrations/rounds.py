"""Report, stop, save and resume a training of another library that goes on in rounds.

A round is a boosting round of LightGBM or XGBoost, or an epoch of ``partial_fit``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import CheckpointError, FitError, PlanError, RunStopped
from nbtoolkit.integrations.support import check_version
from nbtoolkit.run.paths import write_whole

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext

_LOOK_SECONDS = 0.2  # between two looks for a stop, which take 60 us after a round of trees

Metrics = Callable[[], Mapping[str, float]]
Dump = Callable[[], "str | bytes"]


def refuse_ranks(ctx: RunContext, framework: str) -> None:
    """Refuse a run of several ranks: each would train the same model.

    Raises:
        PlanError: the run has several ranks.
    """
    if ctx.world_size > 1:
        raise PlanError(
            f"{framework} trains in one process here, and this run has {ctx.world_size} ranks, "
            "which would all train the same model",
            allowed="one process; it uses the CPU cores of the plan, or one GPU",
            do="nb.launch(train, config, processes=1), or set distributed.world_size: 1",
        )


class Rounds:
    """One training that goes on in rounds: what is saved of it, and what this run does with it.

    Args:
        ctx: the run.
        file: its checkpoint, in the run's ``checkpoints`` folder; a name per training.

    Attributes:
        target: the number of rounds in the finished model; None: not known yet.
        saved: the model that an interrupted run has saved; None: there is none.
        prepared: whether the caller has asked for its parameters.
        continued: whether the caller has asked for :attr:`saved`.
    """

    def __init__(self, ctx: RunContext, file: str) -> None:
        self._ctx, self.path = ctx, ctx.paths.checkpoints / file
        self.target = self._targets(ctx).get(file)
        self.saved: Path | None = None if self.target is None else self.path
        self.prepared = self.continued = self._begun = False
        settings = ctx.config.checkpoint
        self._enabled = settings.enabled
        self._every_steps = settings.every_steps
        self._every_minutes = settings.every_minutes
        self._look_at = self._saved_at = time.monotonic()
        self._save_seconds = 0.0
        self._saved_round = 0

    def begin(self, target: int, first_report: int) -> None:
        """Start to count.

        Args:
            target: the number of rounds in the finished model.
            first_report: the round of the first report.

        Raises:
            FitError: another training of this run has the same name, or ``first_report`` is
                below 1.
        """
        if first_report < 1:
            raise FitError(
                f"every={first_report} is no number of rounds", allowed="1 and more", do="every=10"
            )
        if self._begun:
            raise FitError(
                f"two trainings of one run would write {self.path.name}",
                allowed="a name for each training of a run",
                do='pass name="..." in each call, for example name=f"seed{seed}"',
            )
        self._begun, self.target = True, target
        self._ctx.announce([], first_step=first_report)

    def do_not_save(self, missing: str) -> None:
        """Save nothing, since a resumed run would not continue from it."""
        if self._enabled:
            self._ctx.message(f"an interrupted run starts again from the beginning: {missing}")
        self._enabled = False

    def end_round(self, done: int, metrics: Metrics | None, dump: Dump) -> None:
        """Report after a round, stop if the run must stop, and save when it is time.

        Args:
            done: rounds in the model now.
            metrics: returns what to report; None: nothing after this round.
            dump: returns the model in its own format.

        Raises:
            RunStopped: the run must stop here. The model is saved, unless it was pruned.
        """
        look = time.monotonic() >= self._look_at
        due = self._every_steps is not None and done % self._every_steps == 0
        if not (look or due or metrics):
            return
        try:
            if look:
                self._stop_if_asked()
            if metrics is not None:
                self._ctx.report(metrics(), done)
        except RunStopped as stop:
            if stop.status != "pruned":
                self._save(done, dump)
            raise
        if done != self.target and (due or (look and self._late())):
            self._save(done, dump)

    def _stop_if_asked(self) -> None:
        self._look_at = time.monotonic() + _LOOK_SECONDS
        # Twice as long as the last save took: the model has grown since.
        reserve = 2 * self._save_seconds
        late = self._ctx.deadline is not None and time.time() + reserve >= self._ctx.deadline
        if late or self._ctx.stop_requested():
            self._ctx.raise_if_stopped(reserve=reserve)

    def _late(self) -> bool:
        waited = (time.monotonic() - self._saved_at) / 60
        return self._every_minutes is not None and waited >= self._every_minutes

    def _save(self, done: int, dump: Dump) -> None:
        """Write the model, then the state that a resumed run reads."""
        if not self._enabled or done == self._saved_round:
            return
        began = time.monotonic()
        try:
            write_whole(self.path, dump())
            targets = {**self._targets(self._ctx), self.path.name: self.target}
            self._ctx.save({"rounds": targets}, step=done)
            self._saved_round = done
        except (OSError, CheckpointError) as error:
            self._enabled = False
            self._ctx.message(f"training goes on without checkpoints: {error}", "warning")
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - began

    @staticmethod
    def _targets(ctx: RunContext) -> dict[str, int]:
        targets: dict[str, int] = (ctx.load() or {}).get("rounds", {})
        return targets


def rounds_of(ctx: RunContext, file: str, framework: str = "", minimum: str = "") -> Rounds:
    """The training of this run that saves to ``file``; the same object in every call.

    Args:
        ctx: the run.
        file: see :class:`Rounds`.
        framework: its name; the first call checks that it is installed and that there is one rank.
            Empty: the caller has checked.
        minimum: the oldest version of it that works.

    Raises:
        MissingExtra: the framework is not installed, or too old.
        PlanError: the run has several ranks.
    """
    # In the context, so that it goes with it: a process runs many trials.
    known: dict[str, Rounds] = vars(ctx).setdefault("_trainings_in_rounds", {})
    if file not in known:
        if framework:
            check_version(framework.lower(), minimum)
            refuse_ranks(ctx, framework)
        known[file] = Rounds(ctx, file)
    return known[file]
