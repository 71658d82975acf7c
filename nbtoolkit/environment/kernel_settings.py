"""Hand over to the ranks what a fork of the kernel would pass on: torch's settings, logging.

The ranks are forked from the fork server, so they have none of the kernel's state.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

_STREAMS = ("stdout", "stderr")

# Attributes of torch.backends; an older torch lacks some. Names of torch 2.9 come after the earlier
# ones, which also set them, and an upper one before those below it.
_BACKENDS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)


@dataclass(frozen=True, kw_only=True)
class LogHandler:
    """A handler that writes to a stream or a file.

    Attributes:
        logger: the name of its logger; empty for the root logger.
        target: ``"stdout"``, ``"stderr"``, or the path of a file.
        level: its level.
        formatter: its formatter; None: the default one.
    """

    logger: str
    target: str
    level: int
    formatter: logging.Formatter | None

    def make(self) -> logging.Handler:
        """Make an equal handler in this process. A file is opened with the first record."""
        handler: logging.Handler
        if self.target in _STREAMS:
            handler = logging.StreamHandler(getattr(sys, self.target))
        else:  # never "w": another rank would lose its lines
            handler = logging.FileHandler(self.target, mode="a", delay=True)
        handler.setLevel(self.level)
        handler.setFormatter(self.formatter)
        return handler


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings of the kernel's process that its ranks get.

    Attributes:
        torch: torch's global settings, by name; empty if the kernel has not imported torch.
        levels: the levels of loggers that have one, by name; empty name: the root logger.
        disabled: the level up to which ``logging.disable`` has switched logging off.
        handlers: the handlers of loggers that no library sets up.
    """

    torch: Mapping[str, object]
    levels: Mapping[str, int]
    disabled: int
    handlers: tuple[LogHandler, ...]

    @classmethod
    def read(cls) -> ProcessSettings:
        """Read the settings of this process, without importing anything."""
        loggers = {"": logging.root, **_loggers()}
        return cls(
            torch=_read_torch() if "torch" in sys.modules else {},
            levels={name: logger.level for name, logger in loggers.items() if logger.level},
            disabled=logging.root.manager.disable,
            handlers=tuple(
                log_handler
                for name, logger in loggers.items()
                if not _belongs_to_a_library(name)
                for handler in logger.handlers
                if (log_handler := _as_log_handler(name, handler)) is not None
            ),
        )

    def apply(self) -> None:
        """Give this process the settings, in place of those of an earlier call."""
        if self.torch:
            settings = _torch_settings()
            for name, value in self.torch.items():
                settings[name].write(value)
        for name, level in self.levels.items():
            logging.getLogger(name or None).setLevel(level)
        logging.disable(self.disabled)
        while _added:
            logger, handler = _added.pop()
            logger.removeHandler(handler)
            handler.close()
        for log_handler in self.handlers:
            logger = logging.getLogger(log_handler.logger or None)
            handler = log_handler.make()
            logger.addHandler(handler)
            _added.append((logger, handler))


_added: list[tuple[logging.Logger, logging.Handler]] = []
"""The handlers of the last call of :meth:`ProcessSettings.apply`."""


def hash_seed() -> str | None:
    """Return the ``PYTHONHASHSEED`` that this process was started with; None: it had none.

    The variable's present value has no effect on this process. A random seed cannot be read.
    """
    with suppress(OSError):
        for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"PYTHONHASHSEED":
                return value.decode()
    return None


@dataclass(frozen=True)
class _Setting:
    read: Callable[[], object]
    set: Callable[..., object]

    def write(self, value: object) -> None:
        """Set the value if it differs: some setters change further settings."""
        try:
            if self.read() == value:
                return
        except AttributeError:  # a machine of a cluster with another torch
            return
        except RuntimeError:  # set by the old name, and read by the new one
            pass
        self.set(value)


def _torch_settings() -> dict[str, _Setting]:
    import torch

    settings = {
        "default_dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": _Setting(
            torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
        ),
        "float32_matmul_precision": _Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
    }
    for device in ("cpu", "cuda"):
        settings[f"autocast_dtype.{device}"] = _Setting(
            partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
        )
    for name in _BACKENDS:
        read = partial(attrgetter(name), torch.backends)
        settings[name] = _Setting(read, partial(_set_backend, name))
    return settings


def _set_backend(name: str, value: object) -> None:
    import torch

    *above, last = name.split(".")
    holder: object = torch.backends
    for part in above:
        holder = getattr(holder, part)
    setattr(holder, last, value)


def _read_torch() -> dict[str, object]:
    values = {}
    for name, setting in _torch_settings().items():
        # This torch does not have it, or it was set by another name, which has the value.
        with suppress(AttributeError, RuntimeError):
            values[name] = setting.read()
    return values


def _loggers() -> dict[str, logging.Logger]:
    known = dict(logging.root.manager.loggerDict)
    return {name: logger for name, logger in known.items() if isinstance(logger, logging.Logger)}


def _belongs_to_a_library(logger: str) -> bool:
    """Whether an imported module, which a rank imports too, sets this logger up itself."""
    top = logger.partition(".")[0]
    return top in sys.modules and top != "__main__"


def _as_log_handler(logger: str, handler: logging.Handler) -> LogHandler | None:
    """Describe a handler; None if it is not a plain one of a stream or a file."""
    target = None
    if type(handler) is logging.FileHandler:
        target = handler.baseFilename
    elif type(handler) is logging.StreamHandler:
        target = _stream_name(handler.stream)
    formatter = handler.formatter
    plain = formatter is None or type(formatter) is logging.Formatter
    if target is None or not plain:
        return None
    return LogHandler(logger=logger, target=target, level=handler.level, formatter=formatter)


def _stream_name(stream: object) -> str | None:
    for name in _STREAMS:
        # A kernel replaces both streams; a handler may hold those before.
        known = (getattr(sys, name), getattr(sys, f"__{name}__"))
        if any(stream is each for each in known) or getattr(stream, "name", None) == name:
            return name
    return None
