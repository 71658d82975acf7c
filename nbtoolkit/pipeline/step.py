"""Step: one notebook of a pipeline. Pipeline: all of them, in the order they are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.notebooks.glance import Glance
from nbtoolkit.pipeline.references import references
from nbtoolkit.pipeline.wishes import StepWishes

OWN = "pipeline"
"""What references call the pipeline itself: `${pipeline.folder}`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A notebook, and what it is given."""

    name: str
    place: str
    """File and line."""
    notebook: Path
    parameters: Mapping[str, Any]
    """As written: with references, and texts of a shell as such."""
    places: Mapping[str, str]
    """Parameter -> where it is given."""
    wishes: StepWishes
    glance: Glance

    @property
    def needs(self) -> set[str]:
        """The steps that must be done before."""
        named = {reference.step for reference in references(self.parameters)}
        return (named | set(self.wishes.after)) - {OWN}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Steps in the order they are run: the file's, but none before what it needs."""

    path: Path
    folder: Path
    """Where everything of it goes."""
    steps: tuple[Step, ...]
