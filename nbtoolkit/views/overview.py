"""Overview: what runs, how far it is, when it ends, what is best, what was said last."""

from __future__ import annotations

import time
from pathlib import Path

from nbtoolkit.report.words import duration, number
from nbtoolkit.search.table import SweepTable
from nbtoolkit.views.markup import bar, boxed, rows, said, wrong
from nbtoolkit.views.state import State, seconds_left

_MEANS = {
    "cut off": "its process is gone (killed, or out of memory): Go on takes it up where it was",
    "gone": "its folder was deleted",
    "stopped": "Go on takes it up where it was",
    "deadline": "its time was up: Go on takes it up where it was",
    "paused": "what runs is finished, nothing more is started: Go on starts the rest",
}


def overview(state: State | None, now: float | None = None) -> str:
    """The overview as HTML.

    Args:
        state: of the folder; None: nothing is watched.
        now: unix seconds.
    """
    if state is None:
        return boxed(said("Nothing is watched: press Launch or Sweep, or choose a run."))
    facts = {name: text for name, text in _facts(state, now).items() if text}
    parts = [said(headline(state), strong=True), bar(state.share(), progress(state, now))]
    parts += [rows(facts)]
    if state.status == "failed":
        parts.append(wrong(_error(state)))
    return boxed(*parts)


def overview_text(state: State | None, now: float | None = None) -> str:
    """The same as lines of text."""
    if state is None:
        return "nothing is watched"
    facts = {name: text for name, text in _facts(state, now).items() if text}
    lines = [headline(state), progress(state, now)]
    lines += [f"{name}: {text}" for name, text in facts.items()]
    return "\n".join([*lines, *([_error(state)] if state.status == "failed" else [])])


def headline(state: State) -> str:
    """What it is, and how it is."""
    words = {"run": "run", "sweep": "sweep", "cv": "cross-validation"}
    means = _MEANS.get(state.status) or state.unreadable
    told = f"{state.status} ({means})" if means else state.status
    return f"{words[state.kind]} {state.paths.run_id}: {told}"


def progress(state: State, now: float | None = None) -> str:
    """How far it is, and the time left, in words."""
    if state.table is not None:
        done, total = state.counts()
        noun = "folds" if state.kind == "cv" else "trials"
        text = f"{done} of {total} {noun}" if total else f"{done} {noun}"
    elif state.last_report is not None:
        of = f" of {total}" if (total := state.total_steps()) else ""
        text = f"step {number(state.last_report[1])}{of}"
    else:
        text = "nothing is reported yet" if state.live else "nothing was reported"
    left = seconds_left(state, now)
    return text if left is None else f"{text}, about {duration(left)} left"


def best(state: State) -> str:
    """The best so far in words; empty where there is none."""
    if isinstance(state.table, SweepTable):
        return "; ".join(
            f"trial {one.number}: "
            + ", ".join(
                f"{name} {number(value)}"
                for name, value in zip(state.table.metrics, one.values, strict=False)
            )
            for one in state.table.best[:3]
        )
    last = {name: points[-1][1] for name, points in state.points().items() if points}
    return ", ".join(f"{name} {number(value)}" for name, value in last.items())


def _facts(state: State, now: float | None) -> dict[str, str]:
    sweep = isinstance(state.table, SweepTable)
    return {
        "best" if sweep else "last": best(state),
        "parameters": _params(state),
        "states": _states(state, now),
        "time": _time(state, now),
        "notes": "\n".join(state.notes),
        "folder": str(state.paths.folder),
    }


def _params(state: State) -> str:
    if not isinstance(state.table, SweepTable) or not state.table.best:
        return ""
    chosen = state.table.best[0].params
    return ", ".join(
        f"{name}={number(value) if isinstance(value, float) else value}"
        for name, value in chosen.items()
    )


def _states(state: State, now: float | None) -> str:
    if isinstance(state.table, SweepTable):
        return state.table.summary(now)
    if state.table is not None:
        return state.table.summary()
    return ", ".join(f"rank {rank} {phase}" for rank, phase in sorted(state.phases.items()))


def _time(state: State, now: float | None) -> str:
    if state.began is None:
        return ""
    if state.ended is not None:
        return duration(float(state.ended.get("seconds") or 0.0))
    if not state.live:
        return ""
    return duration(max((time.time() if now is None else now) - state.began, 0.0))


def _error(state: State) -> str:
    error = (state.ended or {}).get("error")
    return f"{error}\nThe whole traceback is in {Path(state.paths.folder) / 'error.json'}"
