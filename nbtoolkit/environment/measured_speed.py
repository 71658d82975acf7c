"""Choose between one process, DDP and DataParallel by speeds measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbtoolkit.text_table import moment

# A strategy replaces the usual one only if it is faster by more than this: two measurements of
# one second differ by a few percent.
_FASTER = 1.05


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """Evidence of how fast each strategy trains this model on these devices.

    Attributes:
        speeds: strategy (``single``, ``ddp``, ``dp``) -> samples per second over all processes, at
            the same global batch size. A strategy that failed is missing.
        ranks: processes of ``ddp``.
        date: unix time of the measurement.
    """

    speeds: Mapping[str, float]
    ranks: int
    date: float

    def choose(self, usual: str) -> tuple[str, str]:
        """Return the strategy to use instead of the usual one, and the reason with the numbers."""
        best = max(self.speeds, key=lambda name: self.speeds[name], default=usual)
        own = self.speeds.get(usual, 0.0)
        chosen = best if self.speeds.get(best, 0.0) > own * _FASTER else usual
        others = sorted(set(self.speeds) - {chosen})
        numbers = ", ".join(
            self._describe(name) for name in (chosen, *others) if name in self.speeds
        )
        return chosen, f"measured {moment(self.date)}: {numbers} (nb.calibrate)"

    def ddp_share(self, devices: int) -> float | None:
        """Return DDP's speed on all devices over that of as many single ones; None: not known."""
        one, together = self.speeds.get("single"), self.speeds.get("ddp")
        if not one or together is None or self.ranks != devices:
            return None
        return together / (devices * one)

    def _describe(self, name: str) -> str:
        return f"{name} does {self.speeds[name]:,.0f} samples/s"
