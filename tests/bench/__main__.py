"""Run all benchmarks, print the table of docs/log.md, fail where a figure is over its gate."""

from __future__ import annotations

import importlib
import sys

from tests.bench.figures import Figure, machine, table

MODULES = (
    "imports",
    "launches",
    "memory",
    "training",
    "checkpoints",
    "recovery",
    "inputs",
    "profiling",
    "strategies",
    "peers",
    "scaling",
    "finders",
    "boosting",
    "search",
    "importance",
    "competition",
    "notebooks",
    "archive",
    "panel",
    "integrations",
    "metric_learning",
    "browser",
)


def main() -> int:
    figures: list[Figure] = []
    for name in sys.argv[1:] or MODULES:
        figures += importlib.import_module(f"tests.bench.{name}").figures()
    print(machine())
    print()
    print(table(figures))
    return 0 if all(figure.passed for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
