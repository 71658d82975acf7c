"""What a pipeline's file may hold, checked setting by setting."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from nbtoolkit.config import Section
from nbtoolkit.config_values import Free, FreeSection, Says, Seconds, Text


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[Text, ...], BeforeValidator(_texts), Says("a text, or a list of texts")]


class StepWishes(Section):
    """One step: a notebook, and what it is given."""

    notebook: Text | None = None
    """The notebook; looked for beside the pipeline's file, then as configuration files are."""
    parameters: Free = FreeSection()
    """Name -> value, for names that its ``parameters`` cell assigns; `${step.name}` refers."""
    after: Texts = ()
    """Steps that must be done before, though no parameter refers to them."""
    files: Texts = ()
    """Files (or patterns, `src/**/*.py`) that make the step run again when they change."""
    kernel: Text | None = None
    """The kernel spec's name; null: the notebook's own."""
    timeout: Seconds | None = None
    """For the whole notebook; null: no limit."""
    cell_timeout: Seconds | None = None
    """For each cell; null: no limit."""


class PipelineWishes(Section):
    """A pipeline's file."""

    folder: Text | None = None
    """Where everything of it goes; null: `outputs/<the file's name>`."""
    steps: Annotated[Free, Says("a name for each step, and its settings under it")] = FreeSection()
    """The steps by name, in order."""
