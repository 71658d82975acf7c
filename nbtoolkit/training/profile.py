"""Profile a few optimizer steps of a fit with ``torch.profiler`` (``train.profile``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import RunStopped
from nbtoolkit.text_table import text_columns
from nbtoolkit.training.callbacks import Callback

if TYPE_CHECKING:
    from torch.profiler import profile

    from nbtoolkit.training.callbacks import FitState
    from nbtoolkit.worker.context import RunContext

# Optimizer steps that pass first, that warm the profiler up, and that are recorded.
WAIT, WARM_UP, ACTIVE = 5, 2, 5

_ROWS = 10
_OUTSIDE = "(outside of operators)"


class StepProfiler(Callback):
    """Records optimizer steps of the first epoch that this process trains, on each rank.

    The trace goes to ``ranks/<rank>/trace.json.gz`` of the run (for https://ui.perfetto.dev or
    chrome://tracing), and rank 0 prints the operators that took the most time. See
    https://docs.pytorch.org/docs/stable/profiler.html.

    Args:
        ctx: the run's context.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._per_epoch: int | None = None
        self._total = WAIT + WARM_UP + ACTIVE
        self._profile: profile | None = None
        self._ready = False

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, RunStopped):
            self.close()
            return
        with contextlib.suppress(RuntimeError):  # of a broken device: the first error matters
            self.close()

    def expect(self, per_epoch: int | None, total: int) -> None:
        """Say how many optimizer steps an epoch (None: unknown) and the run have."""
        self._per_epoch, self._total = per_epoch, total

    def on_train_epoch_start(self, state: FitState) -> None:
        """Start, in the first epoch."""
        from torch.profiler import ProfilerActivity, profile, schedule

        if self._ready:
            return
        activities = [ProfilerActivity.CPU]
        if self._ctx.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        left = self._total - state.step
        if self._per_epoch is not None:
            left = min(left, state.epoch * self._per_epoch - state.step)
        wait, warm_up, active = split_steps(left)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warm_up, active=active, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profile.start()

    def on_train_batch_end(self, state: FitState) -> None:
        """Count an optimizer step."""
        if self._profile is not None:
            self._profile.step()
            if self._ready:
                self.close()

    def on_train_epoch_end(self, state: FitState) -> None:
        """Stop, if the epoch was shorter than expected."""
        self.close()

    def close(self) -> None:
        """Stop; keeps what was recorded so far. May be called twice."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            if not self._ready:
                self._ctx.print("profile: the run stopped before a step was recorded")
            self._ready = True

    def _keep(self, profile: profile) -> None:
        """Write the trace, and print the table; torch calls it when the last step is recorded."""
        if self._ready:
            return
        self._ready = True
        trace = self._ctx.paths.trace(self._ctx.rank)
        hidden = trace.with_name(f".{trace.name}")
        trace.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(hidden))
        os.replace(hidden, trace)
        table = operator_table(profile.key_averages(), device=self._ctx.device.type)
        self._ctx.print(f"{table}\nprofile: {trace} (open it in https://ui.perfetto.dev)")


def split_steps(steps: int) -> tuple[int, int, int]:
    """How many of ``steps`` optimizer steps to wait for, to warm up in, and to record."""
    active = min(ACTIVE, max(1, steps // 2))
    warm_up = min(WARM_UP, steps - active)
    return min(WAIT, steps - active - warm_up), warm_up, active


def operator_table(events: Iterable[Any], device: str) -> str:
    """The operators with the most time of their own, without that of operators they call.

    Args:
        events: from ``torch.profiler.profile.key_averages()``.
        device: ``"cuda"`` sorts by the time on the device, ``"cpu"`` by that on the CPU.
    """
    found: dict[str, tuple[float, int]] = {}
    steps = 1
    for event in events:
        # torch lists a GPU's kernels, too, whose time is that of the operators that started them.
        if event.device_type.name != "CPU":
            continue
        is_step = event.key.startswith("ProfilerStep")
        steps = event.count if is_step else steps
        seconds = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if seconds > 0 and not (is_step and device == "cuda"):
            found[_OUTSIDE if is_step else event.key] = (seconds, event.count)
    total = sum(seconds for seconds, _ in found.values()) or 1.0
    largest = sorted(found.items(), key=lambda item: item[1], reverse=True)[:_ROWS]
    rows = [
        [name[:48], f"{count / steps:.4g}", f"{micros / steps / 1e3:.3f}", f"{micros / total:.0%}"]
        for name, (micros, count) in largest
    ]
    where = "GPU" if device == "cuda" else "CPU"
    return text_columns(["operator", "calls a step", f"{where} ms a step", "share"], rows)
