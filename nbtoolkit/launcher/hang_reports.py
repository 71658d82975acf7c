"""Describe ranks that hang, or that wait for each other in different calls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from nbtoolkit.errors import WorkerHung
from nbtoolkit.launcher.outcome import Failed
from nbtoolkit.launcher.worker_group import RankView
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire import messages
from nbtoolkit.wire.serialization import pack_error
from nbtoolkit.wire.tracebacks import without_launcher

_TOGETHER_CALLS = (
    "all ranks make calls that wait for other ranks (nb.predict, a model in DDP, collectives, "
    "ctx.report), in the same order"
)
_ALONE = "to use a model on one rank only, call ctx.unwrap(model)(...)"

# What a rank does in the phases before the training function is called.
STARTING = {
    "none": "its process has not come up",
    "started": "it waits to join the process group",
    "group": "it loads the training function and the modules that it imports",
}


def hang_failure(
    hung: list[RankView],
    ranks: list[RankView],
    stacks: Mapping[int, str],
    timeout: float,
    paths: RunPaths,
) -> Failed:
    """Return the failure for hung ranks.

    Args:
        hung: the ranks that others wait for.
        ranks: all ranks.
        stacks: of each rank, as it has written them.
        timeout: the seconds for which they were idle.
        paths: of the run.
    """
    error = WorkerHung(
        f"{_names(hung)} sent nothing and used under 1% CPU for {timeout:g} s while another rank "
        f"waits for it or has returned\n{_format_states(ranks, stacks)}",
        allowed="a rank that computes; a rank that waits inside `with "
        "ctx.pause_hang_detection(...)`; any wait shorter than runtime.hang_timeout",
        do=f"compare the ranks' stacks, and read {paths.log(hung[0].rank)}",
    )
    return Failed(error=pack_error(error), rank=hung[0].rank, cause="died")


def hang_warning(
    hung: list[RankView], ranks: list[RankView], stacks: Mapping[int, str], timeout: float
) -> str:
    """Return the warning at half the timeout; see :func:`hang_failure`."""
    return (
        f"{_names(hung)} silent and idle for {timeout / 2:g} s while another rank waits "
        f"or has returned; after {timeout:g} s it counts as hung (runtime.hang_timeout; "
        f"`with ctx.pause_hang_detection(...)` suspends this)\n{_format_states(ranks, stacks)}"
    )


def start_warning(blocked: list[RankView], seconds: float, paths: RunPaths) -> str:
    """Return the warning of ranks that are idle before they have the training function."""
    return "\n".join(
        f"rank {rank.rank} has not started after {seconds:.0f} s: {STARTING[rank.phase]}, and is "
        f"idle; its stack: {paths.stacks(rank.rank)}"
        for rank in blocked
    )


def start_failure(
    blocked: list[RankView], stacks: Mapping[int, str], timeout: float, paths: RunPaths
) -> Failed:
    """Return the failure for ranks that block while they load the training function."""
    error = WorkerHung(
        f"{_names(blocked)} did not start: idle for {timeout:g} s while loading the training "
        f"function and the modules that it imports\n"
        f"{_format_states(blocked, stacks)}",
        allowed="modules that load without waiting for a lock, a download or a disk for longer "
        "than runtime.hang_timeout",
        do=f"find the import in the stack, and read {paths.log(blocked[0].rank)}",
    )
    return Failed(error=pack_error(error), rank=blocked[0].rank, cause="died")


def deadlock_failure(waiting: list[RankView], over: list[RankView], paths: RunPaths) -> Failed:
    """Return the failure for ranks that wait in different calls, or for a rank that has ended."""
    fault = "the ranks wait for each other in different calls: "
    if over:
        fault = "a rank waits for a rank that has returned: "
    calls = [f"rank {rank.rank} {_state(rank)}" for rank in [*waiting, *over]]
    differences = _first_difference(waiting)
    error = WorkerHung(
        fault + "; ".join(calls) + "".join(f"\n  {line}" for line in differences),
        allowed=_TOGETHER_CALLS,
        do=f"at these lines or before them, find a call that only some ranks make, for example "
        f"under `if ctx.is_main:`, and make it on all ranks; {_ALONE}; the ranks' stacks are in "
        f"{paths.stacks(waiting[0].rank)} and the other ranks' folders",
    )
    return Failed(error=pack_error(error), rank=waiting[0].rank, cause="raised")


def refuse_lone_call(asking: list[RankView], others: list[RankView]) -> messages.CallRefused:
    """Return the reply to ranks that wait in a call which the other ranks cannot reach.

    Args:
        asking: the ranks in the call.
        others: ranks that have returned, or wait in a collective.
    """
    question = asking[0].asking
    assert question is not None
    verb = _verb(question)
    here = ", ".join(str(rank.rank) for rank in asking)
    there = ", ".join(f"{rank.rank} (which {_state(rank)})" for rank in others)
    call = f"{verb} at {question.where} was called on rank {here} only; it waits for rank {there}"
    first = others[0]
    if first.rank != 0 or first.over or not first.waits_at:
        return messages.CallRefused(
            what=call,
            allowed=f"all ranks call {verb}, in the same order",
            do="move the call out of `if ctx.is_main:`, so that all ranks make it",
        )
    return messages.CallRefused(
        what=f"rank 0 waits at {first.waits_at} for the other ranks, but {call}",
        allowed=_TOGETHER_CALLS,
        do=f"move the call at {first.waits_at} out of `if ctx.is_main:`; {_ALONE}",
    )


def _verb(question: messages.Question) -> str:
    return {"report": "ctx.report", "check": "ctx.raise_if_stopped"}.get(question.call, "ctx.save")


def _names(ranks: list[RankView]) -> str:
    return "rank " + " and ".join(str(rank.rank) for rank in ranks)


def _state(rank: RankView) -> str:
    """Return what a rank does, as it has said itself."""
    if rank.over:
        return "has returned"
    if rank.asking is not None:
        return f"waits in {_verb(rank.asking)} at {rank.asking.where}"
    if rank.waits_at:
        return f"waits in collective number {rank.collectives} at {rank.waits_at}"
    return f"has started {rank.collectives} collectives"


def _first_difference(ranks: list[RankView]) -> list[str]:
    """Return the first frame in which each rank differs, if the user's line is the same for all.

    The ranks are then in one call of a library, which does different things on them.
    """
    if len({rank.waits_at for rank in ranks}) > 1:
        return []
    for frames in itertools.zip_longest(*(rank.stack for rank in ranks), fillvalue="(no frame)"):
        if len(set(frames)) > 1:
            pairs = zip(ranks, frames, strict=True)
            return [f"rank {rank.rank}: {frame}" for rank, frame in pairs]
    return []


def _format_states(ranks: list[RankView], stacks: Mapping[int, str]) -> str:
    """Return what each rank does, and its stack, as one text."""
    texts = [
        f"--- rank {rank.rank} {_state(rank)}; its stack ---\n"
        f"{without_launcher(stacks.get(rank.rank, '')) or '(none)'}"
        for rank in ranks
    ]
    return "\n".join(texts)


def refuse_different_calls(questions: Sequence[messages.Question]) -> messages.CallRefused:
    """Return the reply to ranks that wait for each other in different calls.

    Args:
        questions: the question of each rank, by rank.
    """
    calls = [
        f"rank {rank}: {question.call} at {question.where}"
        for rank, question in enumerate(questions)
    ]
    return messages.CallRefused(
        what="the ranks wait for each other in different calls: " + "; ".join(calls),
        allowed="all ranks call ctx.report, ctx.raise_if_stopped and ctx.save, in the same order",
        do="make every rank take the same path through the function",
    )
