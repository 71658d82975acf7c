"""Repeats: the leaders trained again with other seeds, before a winner is named.

The best of many noisy trials is partly the luckiest one; a few more seeds tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtoolkit.search.live_trial import LiveTrial, folder_of

if TYPE_CHECKING:
    from nbtoolkit.search.books import Books


class Repeats:
    """Which repetitions are still to be run, once all trials have ended.

    Args:
        books: the study.
        seed: the trials' own; repetitions take the next ones.
    """

    def __init__(self, books: Books, seed: int) -> None:
        self._books, self._seed = books, seed
        self._begun: set[tuple[int, int]] = set()

    @property
    def more(self) -> bool:
        """Whether there is one to be run."""
        return bool(self._missing())

    @property
    def to_come(self) -> int:
        """How many will be begun, also of leaders that are not known yet."""
        wished = self._books.wishes.repeat_top
        done = sum(len(by) for by in self._books.standings.repeats.values())
        running = sum(
            seed not in self._books.standings.repeats.get(number, {})
            for number, seed in self._begun
        )
        return max(0, wished.k * wished.seeds - done - running)

    def next(self) -> LiveTrial | None:
        """The next repetition; None: all have begun."""
        for number, seed in self._missing()[:1]:
            self._begun.add((number, seed))
            params, key = self._books.params(number), f"{folder_of(number)}/seed-{seed}"
            return LiveTrial(number, params, self._books.folds, key=key, seed=seed)
        return None

    def ended(self, trial: LiveTrial) -> None:
        """Take a repetition's value; one that failed is left out of the mean."""
        assert trial.seed is not None
        if trial.leaving is None:
            value = trial.mean(self._books.wishes.metrics[0], trial.folds or 1)
            self._books.repeated(trial.number, trial.seed, value)
        else:
            self._books.not_repeated(trial.number, trial.seed, trial.reason or "")
        if not self.more:
            self._books.name_winner()

    def _missing(self) -> list[tuple[int, int]]:
        """(trial, seed), by seed: when time runs out, all leaders have had as many."""
        wished = self._books.wishes.repeat_top
        leaders = self._books.standings.leaders(wished.k)
        done = {(n, seed) for n, by in self._books.standings.repeats.items() for seed in by}
        return [
            (number, self._seed + i)
            for i in range(1, wished.seeds + 1)
            for number in leaders
            if (number, self._seed + i) not in done | self._begun
        ]
