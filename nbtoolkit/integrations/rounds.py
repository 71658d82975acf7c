"""Report, stop, save and resume a training of another library that goes on in rounds.

A round is a boosting round of LightGBM or XGBoost, or an epoch of ``partial_fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nbtoolkit.errors import CheckpointError, FitError, RunStopped
from nbtoolkit.integrations.support import (
    StepWatch,
    check_version,
    record_checkpoint,
    recorded_trainings,
    refuse_ranks,
)
from nbtoolkit.run.paths import write_whole

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext

Dump = Callable[[], "str | bytes"]


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
        self._ctx, self._watch = ctx, StepWatch(ctx, file)
        self.path = ctx.paths.checkpoints / file
        state = recorded_trainings(ctx).get(file)
        self.saved = None if state is None else self.path
        self.target: int | None = None if state is None else state["target"]
        self.prepared = self.continued = False
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
        self._watch.claim_name()
        self._watch.begin(0)
        self.target = target
        self._ctx.announce([], first_step=first_report)

    def do_not_save(self, missing: str) -> None:
        """Save nothing, since a resumed run would not continue from it."""
        if self._watch.saves:
            self._ctx.message(f"an interrupted run starts again from the beginning: {missing}")
        self._watch.saves = False

    def end_round(self, done: int, metrics: Mapping[str, float] | None, dump: Dump) -> None:
        """Report after a round, stop if the run must stop, and save when it is time.

        Args:
            done: rounds in the model now.
            metrics: what to report; None: nothing after this round.
            dump: returns the model in its own format.

        Raises:
            RunStopped: the run must stop here. The model is saved, unless it was pruned.
        """
        try:
            self._watch.follow(done, lambda: self._save(done, dump))
            if metrics is not None:
                self._ctx.report(metrics, done)
        except RunStopped as stop:
            if stop.status != "pruned":
                self._save(done, dump)
            raise

    def _save(self, done: int, dump: Dump) -> None:
        """Write the model, then the state that a resumed run reads."""
        if not self._watch.saves or done == self._saved_round:
            return
        try:
            write_whole(self.path, dump())
            record_checkpoint(self._ctx, self.path, done, self.path.name, target=self.target)
            self._saved_round = done
        except (OSError, CheckpointError) as error:
            self._watch.saves = False
            self._ctx.message(f"training goes on without checkpoints: {error}", "warning")
        self._watch.saved()


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
