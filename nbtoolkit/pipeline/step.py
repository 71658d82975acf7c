"""Step: one notebook of a pipeline. Pipeline: all of them, in the order they are run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.notebooks.glance import Glance
from nbtoolkit.pipeline.references import Reference, references
from nbtoolkit.pipeline.wishes import StepWishes
from nbtoolkit.yaml_lines import Keys

OWN = "pipeline"
"""What references call the pipeline itself: `${pipeline.folder}`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A notebook, and what it is given."""

    name: str
    notebook: Path
    parameters: Mapping[str, Any]
    """As written: with references, and texts of a shell as such."""
    wishes: StepWishes
    glance: Glance
    places: Mapping[Keys, str]
    """Where each of its settings is given; ``()``: the step itself."""

    @property
    def references(self) -> Iterator[tuple[str, Reference]]:
        """Every reference, with the parameter it stands in."""
        for parameter, value in self.parameters.items():
            for reference in references(value):
                yield parameter, reference

    @property
    def needs(self) -> set[str]:
        """The steps that must be done before."""
        named = {reference.step for _, reference in self.references}
        return (named | set(self.wishes.after)) - {OWN}

    def place(self, *keys: str) -> str:
        """File and line of a setting, else of the step."""
        return self.places.get(keys, self.places[()])


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Steps in the order they are run: the file's, but none before what it needs."""

    path: Path
    folder: Path
    """Where everything of it goes."""
    steps: tuple[Step, ...]
