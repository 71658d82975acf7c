"""Import modules in the fork server, so that supervisors, agents and ranks need not.

A fork server imports what every launch needs (:func:`preload`). While its first ranks start, it
imports what ranks need soon (``LATE``). When the ranks of a kernel have imported further packages,
the kernel starts the next fork server, which imports these too (:func:`import_installed`).

Nothing is imported from the working directory or an editable install, because changed files must
take effect.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping

from nbtoolkit.environment.installed import environment_key, installed_roots
from nbtoolkit.launcher.fork_probe import probe_fork

# Packages that do not survive a fork although a probe of torch passes: they keep native threads and
# connections of their own.
NOT_FORK_SAFE = frozenset(
    {"tensorflow", "jax", "jaxlib", "ray", "grpc", "pyspark", "torch_xla", "triton", "bitsandbytes"}
    | {"keras", "tf_keras"}  # both import TensorFlow
)

# Imported once, for supervisors, agents and ranks. Otherwise elastic and each rank would import the
# last ones in each launch, which takes some milliseconds each.
PRELOADED = (
    "torch",
    "accelerate",
    "cloudpickle",
    "torch.distributed.launcher.api",
    "torch.nn.parallel",
    "torch.utils.data",
    "nbtoolkit.config.schema",
    "nbtoolkit.launcher.supervisor_process",
    "nbtoolkit.launcher.agent",
    "nbtoolkit.worker.main",
    "nbtoolkit.worker.undivided",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "numpy.random",
    "encodings.idna",
    "psutil",
    "shutil",
)

# torch imports it with the first optimizer, which takes 0.6 to 1 s.
LATE = ("torch._dynamo",)

# accelerate 1.6 (Kaggle's) imports torchao if it is installed, which initialises CUDA and so breaks
# every fork (accelerate#3524). Ranks can import these.
TOUCH_DEVICES = ("torchao", "bitsandbytes")


def preload(names: Iterable[str] = PRELOADED) -> None:
    """Import the modules that every launch needs, without touching a device."""
    # For the import system, None means that a module is not installed.
    hidden = {name: None for name in TOUCH_DEVICES if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    for name in names:
        importlib.import_module(name)
    for name in hidden:
        del sys.modules[name]


def import_late() -> None:
    """Import ``LATE`` in a fork server that already serves."""
    gc.disable()  # torch._dynamo takes 1.0 s with the collector, 0.6 s without
    with _errors_left_to_ranks():
        preload(LATE)
    gc.freeze()
    gc.enable()


def import_installed(names: list[str]) -> str:
    """Import modules of installed packages, and test after each package whether forks work.

    Args:
        names: the modules; those of one package need not follow each other.

    Returns:
        The package after whose import no process may be forked, or "".
    """
    from nbtoolkit.environment.hardware import detect_hardware

    device = bool(detect_hardware().usable)
    packages: dict[str, list[str]] = {}
    for name in names:
        packages.setdefault(name.partition(".")[0], []).append(name)
    for package, modules in packages.items():
        before = len(sys.modules)
        for name in modules:
            _import_installed(name)
        if len(sys.modules) == before:
            continue
        if threading.active_count() > 1 or not probe_fork(device=device):
            return package
    return ""


def _import_installed(name: str) -> None:
    with _errors_left_to_ranks():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.startswith(installed_roots()):
            importlib.import_module(name)


@contextlib.contextmanager
def _errors_left_to_ranks() -> Iterator[None]:
    """Ignore errors of an import, which the rank's own import will raise."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            raise


def import_conditions(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Hash what the imports of a fork server depend on.

    Packages read variables when they are imported, and torch does, too. An installation changes
    what an import finds.

    Args:
        environ: the kernel's environment variables.
        names: the modules that the fork server imports besides what every launch needs.
    """
    if not list(names):
        torch_variables = {
            name: value for name, value in environ.items() if name.startswith(("TORCH", "PYTORCH"))
        }
        return environment_key(torch_variables)
    times = []
    for root in installed_roots():
        with contextlib.suppress(OSError):
            times.append(os.stat(root).st_mtime)
    text = f"{environment_key(environ)} {times}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
