"""Check settings that are valid one by one and invalid together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from nbtoolkit.config.fields import as_yaml
from nbtoolkit.config.loading import Keys, Mistake

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


class Conflict(NamedTuple):
    """Settings that do not fit together."""

    problem: str
    do: str
    names: tuple[str, ...]


def conflicts(config: Config, places: Mapping[Keys, str]) -> Iterator[Mistake]:
    """Yield the settings that do not fit together.

    Args:
        config: settings that are valid one by one.
        places: where they were set.
    """
    secret = _password(config.tracking.uri)
    for problem, do, names in (
        *_batch_conflicts(config),
        *_rank_conflicts(config),
        *_time_conflicts(config),
        *([_PASSWORD] if secret else []),
    ):
        set_at = [places.get(tuple(name.split("."))) for name in names]
        place = " and ".join(dict.fromkeys(filter(None, set_at))) or "configuration"
        # The place of an override quotes its value.
        yield Mistake(place=place.replace(secret, "***") if secret else place, what=problem, do=do)


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
    ranks = config.distributed
    size_name = "distributed.world_size"
    enabled = "distributed.enabled"
    strategy = "distributed.strategy"
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
    for name in () if ranks.is_sharded else ("distributed.zero_stage", "distributed.offload"):
        if _value(config, name) not in (None, "none"):
            yield _clash(config, name, strategy, "set strategy: fsdp")
    if ranks.device_ids and size > len(ranks.device_ids):
        problem = f"{size_name}: {size} ranks on {len(ranks.device_ids)} device_ids"
        yield Conflict(problem, "name one device per rank", (size_name, "distributed.device_ids"))


def _clash(config: Config, first: str, second: str, do: str = "remove one of them") -> Conflict:
    """Return the conflict of the values that two settings have."""
    values = [f"{name}: {as_yaml(_value(config, name))}" for name in (first, second)]
    return Conflict(f"{values[0]} conflicts with {values[1]}", do, (first, second))


def _value(config: Config, name: str) -> object:
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def _time_conflicts(config: Config) -> Iterator[Conflict]:
    timeout = config.distributed.timeout
    hang_timeout = config.runtime.hang_timeout
    if timeout <= hang_timeout:
        yield Conflict(
            f"distributed.timeout ({timeout:g} s) is not above hang_timeout ({hang_timeout:g} s)",
            "raise distributed.timeout: a hang must be detected before the group times out",
            ("distributed.timeout", "runtime.hang_timeout"),
        )
    limit = config.runtime.session_limit
    margin = config.runtime.shutdown_margin
    if limit is not None and margin >= limit:
        yield Conflict(
            f"runtime.shutdown_margin ({margin:g} s) leaves no time of session_limit ({limit:g} s)",
            "lower runtime.shutdown_margin: runs would end as they start",
            ("runtime.shutdown_margin", "runtime.session_limit"),
        )


_PASSWORD = Conflict(
    "tracking.uri has a password, and every run's config.yaml would have it, too",
    "take it out, and set the variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD "
    "(or MLFLOW_TRACKING_TOKEN; of a database: PGPASSWORD)",
    ("tracking.uri",),
)


def _password(uri: str | None) -> str | None:
    try:
        return urlsplit(uri or "").password
    except ValueError:  # no URL: MLflow says what is wrong
        return None
