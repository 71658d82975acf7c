"""Hold and validate what is typed into the panel: ten fields, and YAML for everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, get_args

from nbtoolkit.config.loading import dump, parse_settings
from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.errors import ConfigError, NbtoolkitError
from nbtoolkit.search.study.sweep_config import (
    PrunerName,
    SamplerName,
    SweepConfig,
    load_sweep_config,
)

T = TypeVar("T")

TRIALS = 20
"""The trials of a sweep if neither the form nor its YAML says when it ends."""

FILE = "settings.yaml"
"""What errors call the YAML of the form."""

_KEY = re.compile(r"([^\s#:-][^:]*?)\s*:(?:\s|$)")
"""A key of the outermost level at the begin of a line."""

# To check a setting of a sweep by itself.
_ANY_SWEEP = {
    "space": {"seed": [0, 1]},
    "study": {"metric": "loss"},
    "budget": {"n_trials": 1},
}


@dataclass(frozen=True)
class Field:
    """A setting that has a field of its own.

    Attributes:
        name: its dotted name.
        label: beside the field.
        of_sweep: whether it is a setting of a sweep.
        choices: its allowed values, where they are few; else empty.
    """

    name: str
    label: str
    of_sweep: bool = False
    choices: tuple[str, ...] = ()


FIELDS = (
    Field("train.epochs", "epochs"),
    Field("train.batch_size", "batch size"),
    Field("optim.lr", "learning rate"),
    Field("train.precision", "precision", choices=("auto", "fp32", "fp16", "bf16")),
    Field("distributed.world_size", "processes"),
    Field("seed", "seed"),
    Field("budget.n_trials", "trials", of_sweep=True),
    Field("budget.timeout", "time", of_sweep=True),
    Field("study.sampler", "sampler", of_sweep=True, choices=get_args(SamplerName)),
    Field("study.pruner", "pruner", of_sweep=True, choices=("auto", *get_args(PrunerName))),
)
"""The settings that are changed most often. An empty field leaves the setting to the YAML."""


@dataclass(frozen=True)
class Validation:
    """The result of validating a form.

    Attributes:
        form: its contents; None: there is no form.
        config: the configuration; None: something in it is wrong.
        sweep_config: the sweep; None: there is no space, or something in it is wrong.
        errors: what is wrong, by the name of the field; ``"YAML"``: in the YAML, or together.
    """

    form: FormState | None = None
    config: Config | None = None
    sweep_config: SweepConfig | None = None
    errors: Mapping[str, str] = field(default_factory=dict)


class FormState:
    """What stands in the form, right or wrong.

    Args:
        config: the settings that it begins with.
        sweep: the settings of a sweep, or a bare space, that it begins with; empty: none.

    Attributes:
        texts: the text of each field, by the name of its setting.
        yaml: all other settings: those of a run, and those of a sweep with its ``space``.
    """

    def __init__(self, config: Config, sweep: Mapping[str, object] | None = None) -> None:
        settings = {name: new for name, (new, _) in config.differences(Config()).items()}
        searched = dict(sweep or {})
        if searched and not set(searched) & set(SweepConfig.model_fields):
            searched = {"space": searched}
        self.texts: dict[str, str] = {}
        for setting in FIELDS:
            value = (
                _take(searched, setting.name)
                if setting.of_sweep
                else settings.pop(setting.name, None)
            )
            self.texts[setting.name] = "" if value is None else str(value)
        run: dict[str, Any] = {}
        for name, value in settings.items():
            _put(run, name, value)
        self.yaml = "".join(dump(values) for values in (run, searched) if values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FormState) and vars(self) == vars(other)

    @property
    def is_sweep(self) -> bool:
        """Whether the YAML has settings of a sweep."""
        return bool(split_yaml(self.yaml)[1])

    def validate(self) -> Validation:
        """Make the configuration and the sweep, or say what is wrong."""
        form = deepcopy(self)  # another thread may change this one while that is used
        errors = {
            setting.name: error for setting in FIELDS if (error := form._field_error(setting))
        }
        if errors:
            return Validation(form, errors=errors)
        settings, sweep = split_yaml(form.yaml)
        try:
            config = _load(settings, form._load_config)
        except NbtoolkitError as error:
            return Validation(form, errors={"YAML": str(error)})
        try:
            sweep_config = _load(sweep, partial(form._load_sweep, config)) if sweep else None
        except NbtoolkitError as error:
            return Validation(form, config, errors={"YAML": str(error)})
        return Validation(form, config, sweep_config)

    def _load_config(self, file: Path) -> Config:
        return load_config(file, env=None, overrides=self._overrides(of_sweep=False))

    def _load_sweep(self, config: Config, file: Path) -> SweepConfig:
        overrides = self._overrides(of_sweep=True)
        if not self._has_end():
            overrides.append(f"budget.n_trials={TRIALS}")
        return load_sweep_config(file, config, overrides=overrides)

    def _has_end(self) -> bool:
        """Whether a field or the YAML says when the sweep ends."""
        if self.texts["budget.n_trials"].strip() or self.texts["budget.timeout"].strip():
            return True
        document = parse_settings(self.yaml, FILE)
        budget = document.get("budget")
        study = document.get("study")
        limits = budget if isinstance(budget, Mapping) else {}
        typed = self.texts["study.sampler"]
        sampler = typed or (study.get("sampler") if isinstance(study, Mapping) else "")
        return sampler == "grid" or bool(limits.get("n_trials") or limits.get("timeout"))

    def _overrides(self, *, of_sweep: bool) -> list[str]:
        """Return the fields that have a text."""
        names = [setting.name for setting in FIELDS if setting.of_sweep == of_sweep]
        texts = {name: self.texts[name].strip() for name in names}
        return [f"{name}={text}" for name, text in texts.items() if text]

    def _field_error(self, setting: Field) -> str:
        """Say what the text of a field must be; empty: it is right."""
        text = self.texts[setting.name].strip()
        if not text:
            return ""
        override = [f"{setting.name}={text}"]
        try:
            if setting.of_sweep:
                load_sweep_config(_ANY_SWEEP, Config(), overrides=override)
            else:
                Config().with_overrides(override)
        except RecursionError:  # `&a {b: *a}` has no end
            return "is not allowed"
        except NbtoolkitError as error:
            number = text.replace(",", ".") if re.fullmatch(r"-?\d+,\d+", text) else ""
            hint = f"; write {number} (decimal point)" if number else ""
            return f"{error.what.partition(setting.name + ': ')[2] or error.what}{hint}"
        return ""


def split_yaml(text: str) -> tuple[str, str]:
    """Split YAML into the settings of a run and those of a sweep, which keep their lines.

    The lines of the other part are empty, so that an error names the line that the user sees.

    Returns:
        The settings of a run, and those of a sweep; each is empty if it has none.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    of_sweep = False
    for line in text.split("\n"):
        if key := _KEY.match(line):
            of_sweep = key[1] in SweepConfig.model_fields
        parts[of_sweep].append(line)
        parts[not of_sweep].append("")
    run, sweep = ("\n".join(lines) if any(lines) else "" for lines in parts)
    return run, sweep


def replace_section(text: str, name: str, values: Mapping[str, object]) -> str:
    """Replace a section of YAML; all other lines stay, with their comments.

    Args:
        text: the YAML.
        name: of the section: a key of the outermost level.
        values: its new contents; empty: it is removed.
    """
    kept = []
    inside = False
    for line in text.split("\n"):
        if key := _KEY.match(line):
            inside = key[1] == name
        if not inside:
            kept.append(line)
    others = "\n".join(kept).rstrip("\n")
    others += "\n" if others else ""
    return others + (dump({name: dict(values)}) if values else "")


def _take(values: dict[str, object], name: str) -> object:
    """Remove a setting of a section, and the section if it is empty then; return its value."""
    head, _, key = name.partition(".")
    section = values.get(head)
    if not isinstance(section, Mapping) or key not in section:
        return None
    rest = dict(section)
    value = rest.pop(key)
    values[head] = rest
    if not rest:
        del values[head]
    return value


def _put(values: dict[str, Any], name: str, value: object) -> None:
    """Add a setting by its dotted name."""
    *sections, key = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[key] = value


def _load(text: str, load: Callable[[Path], T]) -> T:
    """Load YAML as a file is loaded; errors name :data:`FILE` and its lines."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        file.write_text(text)
        try:
            return load(file)
        except ConfigError as error:
            shown = str(error).replace(f"{file}", FILE)
            raise type(error)(shown) from None
