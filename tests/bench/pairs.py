"""Compare this checkout with another one, run by run.

    python -m tests.bench.pairs OTHER [-n 9] CALL ...

``OTHER`` is a checkout of another commit (``git worktree add``). A ``CALL`` is a module of this
folder (``launches``), or one of its calls with arguments (``"training steps 1"``). Each call is
run in both checkouts in turn, with the interpreter of this one. The table gives the median of the
ratios this/other, their quartiles, and both medians. Ratios hold where the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The figures of a whole module, by name.
WHOLE = """
import importlib, json
module = importlib.import_module("tests.bench.{}")
print(json.dumps({{figure.name: figure.value for figure in module.figures()}}))
"""


def measure(checkout: Path, call: str) -> dict[str, float]:
    """Run a call in a checkout, and return its figures by name."""
    module, *arguments = call.split()
    words = (
        ["-m", f"tests.bench.{module}", *arguments] if arguments else ["-c", WHOLE.format(module)]
    )
    done = subprocess.run(
        [sys.executable, *words],
        cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{call} failed in {checkout}:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {call: found} if isinstance(found, int | float) else found


def compare(call: str, other: Path, pairs: int) -> list[str]:
    """Rows of the table for one call; which checkout comes first alternates."""
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(pairs):
        if number % 2:
            theirs = measure(other, call)
            rounds.append((measure(ROOT, call), theirs))
        else:
            ours = measure(ROOT, call)
            rounds.append((ours, measure(other, call)))
    rows = []
    for name in [name for name in rounds[0][0] if name in rounds[0][1]]:
        ours_all = [ours[name] for ours, _ in rounds]
        theirs_all = [theirs[name] for _, theirs in rounds]
        ratios = [a / b for a, b in zip(ours_all, theirs_all, strict=True) if b]
        if not ratios:
            continue
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        )
        absolute = [f"{statistics.median(values):.4g}" for values in (ours_all, theirs_all)]
        ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        rows.append(f"| {name} | {' | '.join(absolute)} | {ratio} | {len(ratios)} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("other", type=Path)
    parser.add_argument("calls", nargs="+", metavar="CALL")
    parser.add_argument("-n", type=int, default=9, dest="pairs")
    told = parser.parse_args()
    print("| figure | this | other | this/other (quartiles) | pairs |\n|---|---|---|---|---|")
    for call in told.calls:
        print("\n".join(compare(call, told.other.resolve(), told.pairs)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
