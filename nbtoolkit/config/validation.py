"""Report unknown settings, values that are not allowed, and settings that contradict each other.

The one rule for ``study.direction: auto`` and ``checkpoint.mode: auto``. It reads the metric's
name word by word (``val_log_loss`` is val, log, loss) and knows two lists of words. The last word
that is on one of them decides: ``dice_loss`` is a loss. ``score`` decides only where no other word
does: a ``brier_score`` is best where it is lowest. ``neg`` and ``negative`` turn it round, as in
scikit-learn's ``neg_mean_squared_error``. A name without any of these words cannot be judged.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_type_hints

from pydantic import BaseModel, ValidationError

from nbtoolkit.config.aliases import FREE, nearest
from nbtoolkit.config.fields import describe
from nbtoolkit.config.yaml_source import Keys, Layer, Mistake

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


# --- config checks ---
# What is wrong with settings: names nobody knows, values not allowed, settings that clash.


@functools.cache
def fields(model: type[BaseModel]) -> dict[str, str]:
    """Every checked setting of a model of sections: dotted name -> what it allows, in words."""
    found = {}
    for name, hint in _hints(model).items():
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            found.update({f"{name}.{key}": describe(inner) for key, inner in _hints(hint).items()})
        elif name not in FREE:
            found[name] = describe(hint)
    return found


class Clash(NamedTuple):
    """Settings that are right one by one and wrong together."""

    what: str
    do: str
    names: tuple[str, ...]


class Clashes(ValueError):
    """All clashes of one configuration."""

    def __init__(self, clashes: list[Clash]) -> None:
        self.clashes = clashes
        super().__init__("; ".join(f"{clash.what}: {clash.do}" for clash in clashes))


def refuse_clashes(config: Config) -> None:
    """Check what no single setting can check.

    Raises:
        Clashes: there is at least one.
    """
    if clashes := [*_batch_clashes(config), *_rank_clashes(config), *_time_clashes(config)]:
        raise Clashes(clashes)


def _batch_clashes(config: Config) -> Iterator[Clash]:
    per_device = config.train.batch_size_per_device is not None
    if per_device and "batch_size" in config.train.model_fields_set:
        yield Clash(
            "train.batch_size and train.batch_size_per_device are both set",
            "set one of them",
            ("train.batch_size", "train.batch_size_per_device"),
        )
    if config.optim.lr_rule != "none" and not per_device:
        yield Clash(
            "optim.lr_rule has nothing to follow: train.batch_size is the same on any devices",
            "set train.batch_size_per_device, or lr_rule: none",
            ("optim.lr_rule", "train.batch_size"),
        )


def _rank_clashes(config: Config) -> Iterator[Clash]:
    ranks = config.distributed
    size = 0 if ranks.world_size == "auto" else ranks.world_size
    for one, name, word in (
        (ranks.enabled is False, "distributed.enabled", "enabled: false"),
        (ranks.strategy == "single", "distributed.strategy", "strategy: single"),
    ):
        if one and size > 1:
            what = f"distributed.world_size: {size} against {word}"
            yield Clash(what, "take one of them out", ("distributed.world_size", name))
    if ranks.enabled is False and ranks.strategy == "ddp":
        what = "distributed.strategy: ddp against enabled: false"
        names = ("distributed.strategy", "distributed.enabled")
        yield Clash(what, "take one of them out", names)
    if ranks.device_ids and size > len(ranks.device_ids):
        what = f"distributed.world_size: {size} ranks on {len(ranks.device_ids)} device_ids"
        names = ("distributed.world_size", "distributed.device_ids")
        yield Clash(what, "name as many devices as ranks", names)


def _time_clashes(config: Config) -> Iterator[Clash]:
    timeout, silence = config.distributed.timeout, config.runtime.hang_timeout
    if timeout <= silence:
        yield Clash(
            f"distributed.timeout ({timeout:g} s) is not above hang_timeout ({silence:g} s)",
            "raise distributed.timeout: a hang must be found before the group gives up",
            ("distributed.timeout", "runtime.hang_timeout"),
        )
    limit, reserve = config.runtime.session_limit, config.runtime.shutdown_margin
    if limit is not None and reserve >= limit:
        yield Clash(
            f"runtime.shutdown_margin ({reserve:g} s) leaves nothing of "
            f"session_limit ({limit:g} s)",
            "lower runtime.shutdown_margin: runs would end as they begin",
            ("runtime.shutdown_margin", "runtime.session_limit"),
        )


def mistakes(error: ValidationError, layer: Layer, model: type[BaseModel]) -> list[Mistake]:
    """What pydantic found, one mistake for each setting, in our words and with places.

    Args:
        error: what checking ``layer.values`` raised.
        layer: the values that were checked, and their places.
        model: what they were checked against.
    """
    found: dict[object, Mistake] = {}
    for item in error.errors(include_url=False):
        problem = item.get("ctx", {}).get("error")
        if isinstance(problem, Clashes):
            found.update({clash: _clashing(layer, clash) for clash in problem.clashes})
            continue
        keys = _setting(item["loc"], model)
        if item["type"] == "extra_forbidden":
            found.setdefault(keys, _unknown(layer, keys, model))
        else:
            found.setdefault(keys, _wrong(layer, keys, model, item["msg"]))
    return list(found.values())


def _setting(loc: tuple[int | str, ...], model: type[BaseModel]) -> Keys:
    """The setting that a location of pydantic is about: it goes on into unions and lists."""
    keys = tuple(map(str, loc))
    return keys[:1] if keys[0] in FREE or keys[0] in fields(model) else keys[:2]


def _clashing(layer: Layer, clash: Clash) -> Mistake:
    places = [layer.places.get(tuple(name.split("."))) for name in clash.names]
    given = list(dict.fromkeys(place for place in places if place))
    place = " and ".join(given) or "configuration"
    return Mistake(place=place, what=clash.what, do=clash.do)


def _unknown(layer: Layer, keys: Keys, model: type[BaseModel]) -> Mistake:
    dotted, sections = ".".join(keys), list(model.model_fields)
    names = [name for name in fields(model) if name.startswith(f"{keys[0]}.")]
    known = [*fields(model), *(sections if len(keys) == 1 else ())]
    close = nearest(dotted, known)
    other = "put settings of your own under model: or data:" if set(FREE) & set(sections) else ""
    return Mistake(
        place=_place(layer, keys),
        what=f"unknown setting '{dotted}'",
        allowed=", ".join(name.partition(".")[2] for name in names) or ", ".join(sections),
        do=f"did you mean '{close}'?" if close in known or (close and other) else other,
    )


def _wrong(layer: Layer, keys: Keys, model: type[BaseModel], message: str) -> Mistake:
    dotted = ".".join(keys)
    if dotted in FREE:
        what = f"{dotted}: {message.removeprefix('Value error, ')}"
        return Mistake(
            place=_place(layer, keys), what=what, allowed=describe(_hints(model)[dotted])
        )
    value: Any = functools.reduce(lambda values, key: values[key], keys, layer.values)
    what = f"{dotted}: {reprlib.repr(value)} is not allowed"
    return Mistake(
        place=_place(layer, keys),
        what=what,
        allowed=fields(model)[dotted],
        do=f"set one of these, or take the setting out (default: {_default(model, keys)})",
    )


def _default(model: type[BaseModel], keys: Keys) -> str:
    """What a setting is where nobody sets it, as YAML writes it."""
    section = model if len(keys) == 1 else _hints(model)[keys[0]]
    default = section.model_fields[keys[-1]].get_default(call_default_factory=True)
    return default if isinstance(default, str) else json.dumps(default, default=dict)


def _place(layer: Layer, keys: Keys) -> str:
    """The place of a setting, else of what is around it, else of all that is in it."""
    around = (keys[:length] for length in range(len(keys), 0, -1))
    inside = {place: 0 for some, place in layer.places.items() if some[: len(keys)] == keys}
    exact = (layer.places[some] for some in around if some in layer.places)
    return next(exact, " and ".join(inside) or "configuration")


def _hints(model: type[BaseModel]) -> Mapping[str, Any]:
    hints = get_type_hints(model, include_extras=True)
    return {name: hints[name] for name in model.model_fields}


# --- direction ---


Direction = Literal["maximize", "minimize"]

_LOW = """
loss losses error errors err cost mae mse rmse msle rmsle mape smape mase medae mad perplexity
ppl nll bce ce crossentropy kl kld divergence deviance wer cer ter eer fid kid lpips brier ece
mce fpr fnr far frr risk regret distance latency seconds time
"""
LOW = frozenset(_LOW.split())
"""Words of metrics that are best where they are lowest."""

_HIGH = """
accuracy acc auc auroc auprc aucpr rocauc map ap mar f1 f2 fbeta fscore precision recall
sensitivity specificity tpr tnr iou miou giou jaccard dice r2 kappa qwk mcc ndcg mrr bleu rouge
chrf meteor cider psnr ssim gini reward return returns likelihood elbo correlation pearson
spearman corr top similarity throughput coverage purity nmi ari
"""
HIGH = frozenset(_HIGH.split())
"""Words of metrics that are best where they are highest."""

WEAK_HIGH = frozenset({"score", "scores", "variance"})
"""Highest where the name says nothing else: ``final_score``, ``explained_variance``."""

_TURNED = frozenset({"neg", "negative"})


def direction_of(metric: str) -> Direction | None:
    """Judge a metric by its name.

    Args:
        metric: a name such as ``"val_loss"``, ``"valRMSE"``, ``"test/acc@5"``.

    Returns:
        ``"minimize"``, ``"maximize"``, or None: the name says neither.
    """
    words = _words(metric)
    known = [word for word in words if word in LOW or word in HIGH]
    if known:
        low = known[-1] in LOW
    elif WEAK_HIGH & set(words):
        low = False
    else:
        return None
    return "minimize" if low != bool(_TURNED & set(words)) else "maximize"


def resolve(metric: str, config: Config) -> Direction | None:
    """Which values of a metric are best, as the configuration says or its name does.

    Args:
        metric: its name.
        config: ``checkpoint.mode`` says it where ``checkpoint.monitor`` is this metric.

    Returns:
        None: neither says it.
    """
    checkpoint = config.checkpoint
    if checkpoint.monitor == metric and checkpoint.mode != "auto":
        return "minimize" if checkpoint.mode == "min" else "maximize"
    return direction_of(metric)


def _words(metric: str) -> list[str]:
    """Lower-case words: ``valRMSE`` is val, rmse; ``cross_entropy`` is one word."""
    # val|RMSE, Mean|Squared, FID|Score; but IoU
    border = r"(?<=[a-z])(?=[A-Z][A-Z]|[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])"
    apart = re.sub(border, "_", metric).lower()
    words = re.sub(r"cross[^a-z]?entropy", "crossentropy", apart)
    words = re.sub(r"per[^a-z]?sec(ond)?\b", "throughput", words)
    found = re.findall(r"[a-z]+[0-9]*|[0-9]+", words)
    # top5 accuracy, rouge1, hits10: the number belongs to no known word, unless it does (f1, r2)
    return [word if word in LOW | HIGH else word.rstrip("0123456789") for word in found]


# The others of these sections take part in the plan, which holds for every training function.
_PLANNED = {
    "optim": ("lr_rule",),
    "train": ("batch_size", "batch_size_per_device", "precision", "gradient_accumulation_steps"),
}
# `checkpoint.every_minutes` is not here: the overlay of a host sets it, not the user.
_ONLY_FIT = {
    "checkpoint": ("every_epochs", "every_steps", "keep_last"),
    "distributed": ("compression", "powersgd_rank"),
    "tracking": ("log_every_n_steps", "record_samples"),
}

_open: list[set[str]] = []  # what was read since a training function began, of its process


def note_read(section: str, name: str) -> None:
    """Note that a setting is read, while a training function runs.

    Args:
        section: the name of the section's class, such as ``Optim``.
        name: the attribute; ``__dict__`` is the whole section (dumps, copies, comparisons).
    """
    for reads in _open:
        reads.add(f"{section.lower()}.{name}")


def note_used(names: Iterable[str] = ("*",)) -> None:
    """Note settings that are used without a look at the config; ``*``: all of them are."""
    for reads in _open:
        reads.update(names)


@contextmanager
def reads_noted() -> Iterator[set[str]]:
    """Note what is read inside the block, in any thread of this process."""
    reads: set[str] = set()
    _open.append(reads)
    try:
        yield reads
    finally:
        _open.remove(reads)


def unread(config: Config, reads: set[str], searched: Iterable[str] = ()) -> str | None:
    """The warning about settings without effect on a function that has returned; None: all had one.

    Args:
        config: the run's.
        reads: what the function read of it.
        searched: settings that are set by a search, also where it chose their defaults.
    """
    if "*" in reads:
        return None
    idle = [name for name in _set(config, {*searched}) if not reads & {name, _whole(name)}]
    if not idle:
        return None
    told = "".join(f"\n    {name} ({config.place(name)})" for name in idle)
    return (
        "settings without effect: only nb.fit uses them, and the training function has ended "
        f"without calling it and without reading them:{told}\n"
        "  Allowed: settings that nb.fit or the training function uses\n"
        f"  Do now:  read them in the function (config.{idle[0]}), call nb.fit, or delete them"
    )


def _whole(name: str) -> str:
    return f"{name.partition('.')[0]}.__dict__"


def _set(config: Config, searched: set[str]) -> Iterator[str]:
    """The names of `nb.fit`'s own settings that are searched or differ from their defaults."""
    for section in (*_PLANNED, *_ONLY_FIT):
        values: Any = getattr(config, section)
        for name in _ONLY_FIT.get(section, type(values).model_fields):
            dotted, default = f"{section}.{name}", type(values).model_fields[name].default
            is_set = dotted in searched or getattr(values, name) != default
            if is_set and name not in _PLANNED.get(section, ()):
                yield dotted
