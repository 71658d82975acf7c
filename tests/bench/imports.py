"""Cost of `import nbtoolkit`, and of launches of a function whose imports take 3 s."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

SLOW_NAME = "nbtoolkit_bench_slow_import"


def import_seconds() -> float:
    """Of `import nbtoolkit`, over an interpreter that imports nothing; medians of 7."""

    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    pairs = [(run("import nbtoolkit"), run("pass")) for _ in range(7)]
    return median([with_it - without for with_it, without in pairs])


def slow_import() -> dict[str, float]:
    """First and second launch, one right after the other."""

    def train(config: nb.Config, ctx: nb.RunContext) -> int:
        import importlib

        return int(importlib.import_module(SLOW_NAME).VALUE)

    spent = []
    with quiet_config() as config:
        for _ in range(2):
            start = time.perf_counter()
            result = nb.launch(train, config, processes=2, resume="never", display="off")
            assert result.value == 42
            spent.append(time.perf_counter() - start)
    return {"first": spent[0], "second": spent[1]}


def figures() -> list[Figure]:
    module = Path(sysconfig.get_path("purelib")) / f"{SLOW_NAME}.py"
    module.write_text("import time\ntime.sleep(3)\nVALUE = 42\n")
    try:
        slow = in_fresh_process("tests.bench.imports", "slow")
    finally:
        module.unlink()
    return [
        Figure("import nbtoolkit", import_seconds(), "s", 0.15, 0.3),
        Figure("first launch of a function whose imports take 3 s", slow["first"], "s"),
        Figure("second launch of it, at once", slow["second"], "s", 0.5, 1.0),
    ]


if __name__ == "__main__":
    print(json.dumps(slow_import()))
