"""Define how a pipeline ended, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbtoolkit.config.yaml_source import dump
from nbtoolkit.environment.deadline import span
from nbtoolkit.text_table import html_columns

StepStatus = Literal["done", "skipped", "early"]
"""``early``: it published a `status` that says that there is more to do."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step published, and where its executed copy is."""

    name: str
    status: StepStatus
    reason: str
    """Why it was run, or skipped."""
    values: dict[str, Any]
    """What its notebook published."""
    output: Path
    """The executed copy; HTML, record and log lie beside it."""
    seconds: float
    """What its run took; of a skipped step, that run's."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelineResult:
    """The results of all steps, by name: ``result["sweep"].values``.

    A pipeline whose step fails has no result: :func:`nbtoolkit.run_pipeline` raises.
    """

    steps: dict[str, StepResult]
    """In the order they were run; after one that ended early there are no more."""
    status: str
    """``"completed"``, or the status that a step published (``"deadline"``, ``"stopped"``)."""
    folder: Path
    seconds: float
    """Of this run."""

    def __getitem__(self, name: str) -> StepResult:
        return self.steps[name]

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """What the steps published, by step."""
        return {name: step.values for name, step in self.steps.items()}

    def values_as_yaml(self) -> str:
        """The same as YAML text."""
        return dump(self.values)

    def __repr__(self) -> str:
        steps = ", ".join(f"{step.name}: {step.status}" for step in self.steps.values())
        return f"PipelineResult({self.status}, {steps}, {span(self.seconds)}, {self.folder})"

    def _repr_html_(self) -> str:
        header = ("step", "", "time", "published", "executed copy")
        rows = [
            (step.name, step.status, span(step.seconds), _short(step.values), str(step.output))
            for step in self.steps.values()
        ]
        return html_columns(header, rows)


def _short(values: dict[str, Any]) -> str:
    plain = {name: value for name, value in values.items() if not isinstance(value, (dict, list))}
    text = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in plain.items()
    )
    return text if len(text) <= 120 else f"{text[:117]}..."
