"""Report, stop, save and resume a training of another library that goes on in rounds.

A round is a boosting round of LightGBM or XGBoost, or an epoch of ``partial_fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nbtoolkit.errors import CheckpointError, FitError, RunStopped
from nbtoolkit.extras.integrations.support import claim_name, record_checkpoint, recorded_trainings
from nbtoolkit.run.paths import write_whole
from nbtoolkit.worker.watch import Watch

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext

Dump = Callable[[], "str | bytes"]


class Rounds:
    """One training that goes on in rounds.

    Args:
        ctx: the run.
        file: its checkpoint, in the run's ``checkpoints`` folder; a name per training.
        last: rounds in the finished model.
        every: report after this number of rounds, and after the last one.

    Attributes:
        saved: the model that an interrupted run has saved; None: there is none.

    Raises:
        FitError: another training of this run has the same name, or ``every`` is below 1.
    """

    def __init__(self, ctx: RunContext, file: str, last: int, *, every: int = 1) -> None:
        if every < 1:
            raise FitError(
                f"every={every} is no number of rounds", allowed="1 and more", do="every=10"
            )
        claim_name(ctx, file)
        ctx.announce([], first_step=every)
        self._ctx = ctx
        self._watch = Watch(ctx)
        self._last = last
        self._every = every
        self._path = ctx.paths.checkpoints / file
        self.saved = self._path if file in recorded_trainings(ctx) else None
        self._saved_round = 0

    def do_not_save(self, missing: str) -> None:
        """Save nothing, since a resumed run would not continue from it."""
        if self._watch.times.enabled:
            self._ctx.message(f"an interrupted run starts again from the beginning: {missing}")
        self._watch.times.enabled = False

    def end_round(self, done: int, metrics: Mapping[str, float], dump: Dump) -> None:
        """Report if it is time, stop if the run must stop, and save when it is time.

        Args:
            done: rounds in the model now.
            metrics: the model's.
            dump: returns the model in its own format.

        Raises:
            RunStopped: the run must stop here. The model is saved, unless it was pruned.
        """
        self._watch.follow(lambda: self._save(done, dump), done)
        if not metrics or (done % self._every and done != self._last):
            return
        try:
            self._ctx.report(metrics, done)
        except RunStopped as stop:
            if stop.status != "pruned":
                self._watch.save(lambda: self._save(done, dump))
            raise

    def _save(self, done: int, dump: Dump) -> None:
        """Write the model, then the state that a resumed run reads."""
        if done == self._saved_round:
            return
        try:
            write_whole(self._path, dump())
            record_checkpoint(self._ctx, self._path, done, self._path.name)
            self._saved_round = done
        except (OSError, CheckpointError) as error:
            self._watch.times.enabled = False
            self._ctx.message(f"training goes on without checkpoints: {error}", "warning")
