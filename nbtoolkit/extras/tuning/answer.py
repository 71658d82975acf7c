"""Keep what was measured for a function and its devices, and show it as a line and a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from nbtoolkit.cards import Card, Table, Text, html
from nbtoolkit.run.kept_answers import answer_key, answers_file, kept_answer, read_answers
from nbtoolkit.run.paths import exclusive, write_json
from nbtoolkit.text_table import text_columns

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.launcher.train_function import Train
    from nbtoolkit.views.figure import Chart


class MeasuredTable:
    """A table with a line on it: text with ``print``, HTML in a cell."""

    def columns(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the header, and the values of each row."""
        raise NotImplementedError

    @property
    def why(self) -> str:
        """What the table says, in a line."""
        raise NotImplementedError

    def _card(self) -> Card:
        return Card("", [Table(*self.columns()), Text(self.why)], span=4)

    def __repr__(self) -> str:
        return f"{text_columns(*self.columns())}\n{self.why}"

    def _repr_html_(self) -> str:
        return html([self._card()])


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """What a short run with some settings has shown.

    Attributes:
        samples_per_second: over all ranks; 0 if it failed.
        memory: the largest memory of a rank in GB; 0 if it failed.
        reason: why it failed, in a line; empty if it did not.
    """

    samples_per_second: float = 0.0
    memory: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class FinderResult(MeasuredTable):
    """The result of a finder.

    Attributes:
        seconds: what the measurement took.
        measured: its unix time.
        kept: whether it was measured by an earlier call.
    """

    seconds: float = field(default=0.0, compare=False)
    measured: float = field(default=0.0, compare=False)
    kept: bool = field(default=False, compare=False)

    def plot(self) -> Chart | None:
        """Return a chart of what was measured, which a cell shows below the table.

        None: there is none.
        """
        return None

    def _repr_html_(self) -> str:
        drawn = self.plot()
        return html([self._card(), *(drawn.cards if drawn else [])])

    @property
    def cost(self) -> str:
        """What the answer took, in words."""
        taken = f"measured in {self.seconds:.1f} s"
        return f"{taken}, kept; force=True measures again" if self.kept else taken


Found = TypeVar("Found", bound=FinderResult)


@dataclass(frozen=True)
class Subject:
    """A training function to measure.

    Attributes:
        train: a function that calls :func:`nbtoolkit.fit`.
        config: the configuration of the run to come.
    """

    train: Train
    config: Config

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.train, "__name__", "the function")

    def key(self, *more: object) -> str:
        """Identify what an answer depends on, see ``answer_key`` in ``run/kept_answers.py``."""
        return answer_key(self.train, self.config, *more)

    def find(
        self, kind: type[Found], name: str, key: str, measure: Callable[[], Found], *, force: bool
    ) -> Found:
        """Return the answer that was kept under ``name`` and ``key``, or measure and keep it.

        Args:
            kind: the class of the answer.
            name: of the measurement.
            key: see :meth:`key`.
            measure: makes the answer; its time is taken here.
            force: measure, also if there is a kept answer.
        """
        kept = None if force else kept_answer(self.config, name, key)
        if kept is not None:
            with suppress(ValidationError):  # of another version
                return TypeAdapter(kind).validate_python({**kept, "kept": True})
        began = time.monotonic()
        answer = measure()
        seconds = round(time.monotonic() - began, 1)
        answer = replace(answer, seconds=seconds, measured=time.time())
        keep_answer(self.config, name, key, asdict(answer))
        return answer


def keep_answer(config: Config, name: str, key: str, answer: Mapping[str, object]) -> None:
    """Keep an answer, in place of an earlier one; other processes may do so at the same time."""
    file = answers_file(config)
    with exclusive(file):
        kept = read_answers(config)
        kept.setdefault(name, {})[key] = {**answer, "measured": time.time()}
        write_json(file, kept)
