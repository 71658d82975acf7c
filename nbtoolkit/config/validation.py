"""Report unknown settings, invalid values and conflicting settings.

The module also infers from a metric's name whether the metric is maximized or minimized.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_type_hints
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from nbtoolkit.config.aliases import FREE, nearest
from nbtoolkit.config.fields import describe
from nbtoolkit.config.yaml_source import Keys, Layer, Mistake

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


@functools.cache
def fields(model: type[BaseModel]) -> dict[str, str]:
    """Describe every checked setting of a model: dotted name -> allowed values."""
    described = {}
    for name, hint in _hints(model).items():
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            inner = {f"{name}.{key}": describe(each) for key, each in _hints(hint).items()}
            described.update(inner)
        elif name not in FREE:
            described[name] = describe(hint)
    return described


class Conflict(NamedTuple):
    """Settings that are valid one by one and invalid together."""

    what: str
    do: str
    names: tuple[str, ...]
    secret: str = ""
    """A text that the error must not quote from the configuration."""


class ConflictError(ValueError):
    """All conflicts of one configuration."""

    def __init__(self, conflicts: list[Conflict]) -> None:
        self.conflicts = conflicts
        super().__init__("; ".join(f"{conflict.what}: {conflict.do}" for conflict in conflicts))


def check_conflicts(config: Config) -> None:
    """Check the settings against each other.

    Raises:
        ConflictError: settings conflict.
    """
    conflicts = [*_batch_conflicts(config), *_rank_conflicts(config), *_time_conflicts(config)]
    if conflicts := [*conflicts, *_password_conflicts(config)]:
        raise ConflictError(conflicts)


def _batch_conflicts(config: Config) -> Iterator[Conflict]:
    per_device = config.train.batch_size_per_device is not None
    if per_device and "batch_size" in config.train.model_fields_set:
        yield Conflict(
            "train.batch_size and train.batch_size_per_device are both set",
            "set one of them",
            ("train.batch_size", "train.batch_size_per_device"),
        )
    if config.optim.lr_rule != "none" and not per_device:
        yield Conflict(
            "optim.lr_rule has no effect: train.batch_size does not depend on the devices",
            "set train.batch_size_per_device, or lr_rule: none",
            ("optim.lr_rule", "train.batch_size"),
        )


# Settings that belong to DDP, or that were not made for copied or sharded models.
_NOT_WITH_DATA_PARALLEL = ("train.compile", "train.activation_checkpointing")
_NOT_WITH_SHARDS = (
    "distributed.compression",
    "distributed.find_unused_parameters",
    "distributed.static_graph",
    "train.compile",
    "train.weight_averaging",
)


def _rank_conflicts(config: Config) -> Iterator[Conflict]:
    ranks, size_name = config.distributed, "distributed.world_size"
    enabled, strategy = "distributed.enabled", "distributed.strategy"
    size = 0 if ranks.world_size == "auto" else ranks.world_size
    if ranks.enabled is False and size > 1:
        yield _clash(config, size_name, enabled)
    if ranks.strategy in ("single", "dp") and size > 1:
        yield _clash(config, size_name, strategy)
    asking = ranks.sharded_by.partition(":")[0] or strategy
    if ranks.enabled is False and (ranks.strategy in ("ddp", "dp") or ranks.is_sharded):
        yield _clash(config, asking, enabled)
    refused = _NOT_WITH_DATA_PARALLEL if ranks.strategy == "dp" else ()
    for name in _NOT_WITH_SHARDS if ranks.is_sharded else refused:
        if _value(config, name) not in (None, False, "none"):
            do = "remove one of them, or set strategy: ddp"
            yield _clash(config, asking, name, do)
    if ranks.backend == "tensorflow" and ranks.is_sharded:  # it trains in its own way
        yield _clash(config, asking, "distributed.backend")
    if not ranks.is_sharded:
        for name in ("zero_stage", "offload"):
            if getattr(ranks, name) not in (None, "none"):
                yield _clash(config, f"distributed.{name}", strategy, "set strategy: fsdp")
    if ranks.device_ids and size > len(ranks.device_ids):
        what = f"{size_name}: {size} ranks on {len(ranks.device_ids)} device_ids"
        yield Conflict(what, "name one device per rank", (size_name, "distributed.device_ids"))


def _clash(config: Config, first: str, second: str, do: str = "remove one of them") -> Conflict:
    """The conflict of the values that two settings have."""
    one, other = (f"{name}: {_shown(_value(config, name))}" for name in (first, second))
    return Conflict(f"{one} conflicts with {other}", do, (first, second))


def _value(config: Config, name: str) -> object:
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def _shown(value: object) -> str:
    """A value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value, default=dict)


def _time_conflicts(config: Config) -> Iterator[Conflict]:
    timeout, hang_timeout = config.distributed.timeout, config.runtime.hang_timeout
    if timeout <= hang_timeout:
        yield Conflict(
            f"distributed.timeout ({timeout:g} s) is not above hang_timeout ({hang_timeout:g} s)",
            "raise distributed.timeout: a hang must be detected before the group times out",
            ("distributed.timeout", "runtime.hang_timeout"),
        )
    limit, margin = config.runtime.session_limit, config.runtime.shutdown_margin
    if limit is not None and margin >= limit:
        yield Conflict(
            f"runtime.shutdown_margin ({margin:g} s) leaves no time of session_limit ({limit:g} s)",
            "lower runtime.shutdown_margin: runs would end as they start",
            ("runtime.shutdown_margin", "runtime.session_limit"),
        )


def _password_conflicts(config: Config) -> Iterator[Conflict]:
    try:
        password = urlsplit(config.tracking.uri or "").password
    except ValueError:  # no URL: MLflow says what is wrong
        password = None
    if password:
        yield Conflict(
            "tracking.uri has a password, and every run's config.yaml would have it, too",
            "take it out, and set the variables MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN; of a database: PGPASSWORD)",
            ("tracking.uri",),
            password,
        )


def mistakes(error: ValidationError, layer: Layer, model: type[BaseModel]) -> list[Mistake]:
    """Convert pydantic's errors to one mistake per setting, with its place.

    Args:
        error: the error from validating ``layer.values``.
        layer: the validated values and their places.
        model: the model they were validated against.
    """
    by_setting: dict[object, Mistake] = {}
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConflictError):
            by_setting.update({each: _conflicting(layer, each) for each in cause.conflicts})
            continue
        keys = _setting(item["loc"], model)
        if item["type"] == "extra_forbidden":
            by_setting.setdefault(keys, _unknown(layer, keys, model))
        else:
            by_setting.setdefault(keys, _invalid(layer, keys, model, item["msg"]))
    return list(by_setting.values())


def _setting(loc: tuple[int | str, ...], model: type[BaseModel]) -> Keys:
    """Cut pydantic's location, which continues into unions and lists, down to the setting."""
    keys = tuple(map(str, loc))
    return keys[:1] if keys[0] in FREE or keys[0] in fields(model) else keys[:2]


def _conflicting(layer: Layer, conflict: Conflict) -> Mistake:
    places = [layer.places.get(tuple(name.split("."))) for name in conflict.names]
    place = " and ".join(dict.fromkeys(filter(None, places))) or "configuration"
    if conflict.secret:
        place = place.replace(conflict.secret, "***")
    return Mistake(place=place, what=conflict.what, do=conflict.do)


def _unknown(layer: Layer, keys: Keys, model: type[BaseModel]) -> Mistake:
    dotted, sections = ".".join(keys), list(model.model_fields)
    names = [name for name in fields(model) if name.startswith(f"{keys[0]}.")]
    known = [*fields(model), *(sections if len(keys) == 1 else ())]
    close = nearest(dotted, known)
    hint = "put your own settings under model: or data:" if set(FREE) & set(sections) else ""
    return Mistake(
        place=_place(layer, keys),
        what=f"unknown setting '{dotted}'",
        allowed=", ".join(name.partition(".")[2] for name in names) or ", ".join(sections),
        do=f"did you mean '{close}'?" if close in known or (close and hint) else hint,
    )


_FINDERS = {
    "optim.lr": "nb.find_learning_rate(train, config)",
    "train.num_workers": 'nb.compare(train, config, [{"train.num_workers": n} for n in (0, 2)])',
}
"""The calls that suggest a value for settings that have no ``auto``: a launch measures nothing."""


def _invalid(layer: Layer, keys: Keys, model: type[BaseModel], message: str) -> Mistake:
    dotted, place = ".".join(keys), _place(layer, keys)
    if dotted in FREE:
        what = f"{dotted}: {message.removeprefix('Value error, ')}"
        return Mistake(place=place, what=what, allowed=describe(_hints(model)[dotted]))
    value = layer.values[keys[0]] if len(keys) == 1 else layer.values[keys[0]][keys[1]]
    do = f"set one of these, or remove the setting (default: {_default(model, keys)})"
    if value == "auto" and dotted in _FINDERS:
        do = f"set a number: {_FINDERS[dotted]} measures which one; a launch measures nothing"
    return Mistake(
        place=place,
        what=f"{dotted}: {reprlib.repr(value)} is not allowed",
        allowed=fields(model)[dotted],
        do=do,
    )


def _default(model: type[BaseModel], keys: Keys) -> str:
    """Return a setting's default as YAML writes it."""
    section = model if len(keys) == 1 else _hints(model)[keys[0]]
    return _shown(section.model_fields[keys[-1]].get_default(call_default_factory=True))


def _place(layer: Layer, keys: Keys) -> str:
    """Return the place of a setting, else of its section, else of all values inside it."""
    for length in range(len(keys), 0, -1):
        if keys[:length] in layer.places:
            return layer.places[keys[:length]]
    inside = {place: 0 for other, place in layer.places.items() if other[: len(keys)] == keys}
    return " and ".join(inside) or "configuration"


def _hints(model: type[BaseModel]) -> Mapping[str, Any]:
    hints = get_type_hints(model, include_extras=True)
    return {name: hints[name] for name in model.model_fields}


# --- direction ---


Direction = Literal["maximize", "minimize"]

_LOW = """
loss losses error errors err cost mae mse rmse msle rmsle mape smape mase medae mad perplexity
ppl nll bce ce crossentropy kl kld divergence deviance wer cer ter eer fid kid lpips brier ece
mce fpr fnr far frr risk regret distance latency seconds time logloss mlogloss merror nloglik l1 l2
"""
LOW = frozenset(_LOW.split())
"""Words in the names of metrics to minimize."""

_HIGH = """
accuracy acc auc auroc auprc aucpr rocauc map ap mar f1 f2 fbeta fscore precision recall
sensitivity specificity tpr tnr iou miou giou jaccard dice r2 kappa qwk mcc ndcg mrr bleu rouge
chrf meteor cider psnr ssim gini reward return returns likelihood elbo correlation pearson
spearman corr top similarity throughput coverage purity nmi ari
"""
HIGH = frozenset(_HIGH.split())
"""Words in the names of metrics to maximize."""

WEAK_HIGH = frozenset({"score", "scores", "variance"})
"""Words that mean maximize if no other word decides: ``final_score``, ``explained_variance``."""

_NEGATED = frozenset({"neg", "negative"})


def direction_of(metric: str) -> Direction | None:
    """Infer a metric's direction from its name.

    This is the rule behind ``study.direction: auto`` and ``checkpoint.mode: auto``. The name is
    split into words (``val_log_loss`` is val, log, loss), and the last known word decides:
    ``dice_loss`` is a loss. ``score`` decides only if no other word does: a ``brier_score`` is
    minimized. ``neg`` and ``negative`` reverse the direction, as in scikit-learn's
    ``neg_mean_squared_error``.

    Args:
        metric: a name such as ``"val_loss"``, ``"valRMSE"``, ``"test/acc@5"``.

    Returns:
        ``"minimize"``, ``"maximize"``, or None if the name has no known word.
    """
    words = _words(metric)
    known = [word for word in words if word in LOW or word in HIGH]
    if known:
        low = known[-1] in LOW
    elif WEAK_HIGH & set(words):
        low = False
    else:
        return None
    return "minimize" if low != bool(_NEGATED & set(words)) else "maximize"


def resolve(metric: str, config: Config) -> Direction | None:
    """Return a metric's direction: from the configuration, else from its name.

    Args:
        metric: the metric's name.
        config: its ``checkpoint.mode`` decides if ``checkpoint.monitor`` is this metric.

    Returns:
        None if neither decides.
    """
    checkpoint = config.checkpoint
    if checkpoint.monitor == metric and checkpoint.mode != "auto":
        return "minimize" if checkpoint.mode == "min" else "maximize"
    return direction_of(metric)


def _words(metric: str) -> list[str]:
    """Split a name into lower-case words: ``valRMSE`` is val, rmse; ``cross_entropy`` is one."""
    # Splits val|RMSE, Mean|Squared and FID|Score, but not IoU.
    border = r"(?<=[a-z])(?=[A-Z][A-Z]|[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])"
    apart = re.sub(border, "_", metric).lower()
    words = re.sub(r"cross[^a-z]?entropy", "crossentropy", apart)
    words = re.sub(r"per[^a-z]?sec(ond)?\b", "throughput", words)
    parts = re.findall(r"[a-z]+[0-9]*|[0-9]+", words)
    # top5 accuracy, rouge1, hits10: the number is no part of a known word, except in f1 and r2.
    return [part if part in LOW | HIGH else part.rstrip("0123456789") for part in parts]
