"""NotebookResult: how a notebook's run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.runtime.table import html_table
from nbtoolkit.runtime.timing import span
from nbtoolkit.yaml_lines import dump


@dataclass(frozen=True, kw_only=True, repr=False)
class NotebookResult:
    """What a notebook published, and where its executed copy is.

    A notebook that fails has no result: :func:`nbtoolkit.run_notebook` raises.
    """

    values: dict[str, Any]
    """What the notebook published with ``nb.publish``, as plain values."""
    parameters: dict[str, Any]
    """The values it was given; the others are its defaults."""
    output: Path
    """The executed copy."""
    html: Path | None
    """The same as a page; None where none was wanted."""
    log: Path
    """Everything its cells wrote."""
    runs: list[Path]
    """The folders of the runs, sweeps and cross-validations that it has started, oldest first."""
    seconds: float
    """From the kernel's start to the last cell's end."""

    def values_as_yaml(self) -> str:
        """The published values as YAML text; empty where nothing was published."""
        return dump(self.values) if self.values else ""

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={_short(value)}" for name, value in self.values.items())
        return (
            f"NotebookResult({values or 'nothing published'}, {span(self.seconds)}, {self.output})"
        )

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [*self.values.items()]
        rows += [("run", folder) for folder in self.runs]
        rows += [("executed copy", self.output), ("time", span(self.seconds))]
        return html_table("notebook: completed", rows)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
