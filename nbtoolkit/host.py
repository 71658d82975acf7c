"""Detect the host (Kaggle, Colab, Jupyter, Slurm, script), its CPUs and its memory."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

from nbtoolkit.errors import ConfigError, LaunchError
from nbtoolkit.text_table import gib, html_table

# --- limits ---
# How many CPUs and how much memory this process may use, containers counted.


ROOT = Path("/")


def cpu_count(root: Path = ROOT, affinity: int | None = None) -> int:
    """The CPUs this process may keep busy: its affinity mask, cut by a container's CPU quota.

    Args:
        root: where ``/proc`` and ``/sys`` are looked for.
        affinity: CPUs in the affinity mask; default: asked from the system.

    Returns:
        At least 1. A quota of 1.5 CPUs counts as 1: a thread above the quota is throttled, not run.
    """
    cpus = affinity or _affinity()
    return max(1, int(min([cpus, *_cpu_quotas(root)])))


def memory_limit(root: Path = ROOT) -> int:
    """Bytes of memory this process may use: the machine's, cut by containers; 0 when unknown."""
    known = [*_machine_memory(root), *_memory_limits(root)]
    return min(known, default=0)


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _machine_memory(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            yield int(line.split()[1]) * 1024  # "MemTotal:   24684092 kB"


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
            value = _text(folder / name).strip()
            if value.isdigit():  # no limit: "max" in version 2, a huge number in version 1
                yield int(value)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        words = _text(folder / "cpu.max").split()  # version 2: "150000 100000" or "max 100000"
        words = words or [
            _text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group folders that bind this process: its own and all above, version 2 and 1.

    A limit may stand at any level; inside a container the path names folders of the host that are
    not there, and the container's own limit stands at the top.
    """
    top = root / "sys/fs/cgroup"
    own = {"": "/", controller: "/"}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    for folder, path in ((top, own[""]), (top / controller, own[controller])):
        below = PurePosixPath(path.lstrip("/"))
        yield from (folder / part for part in dict.fromkeys((below, *below.parents)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not there, or not ours to read
        return ""


# --- host ---


HostKind = Literal["kaggle", "colab", "jupyter", "script", "slurm"]

# Set on TPU machines themselves (Kaggle, Colab, Google Cloud), not by a client on a laptop.
_TPU_NAMES = ("TPU_NAME", "COLAB_TPU_ADDR", "TPU_ACCELERATOR_TYPE")


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where this process runs. Every verdict stands beside its reason."""

    kind: HostKind
    """``kaggle``, ``colab``, ``jupyter`` (any other IPython kernel), ``slurm`` or ``script``."""
    reason: str
    """Why :attr:`kind` is what it is."""
    working: Path
    """Where results may be written and are kept."""
    scratch: Path
    """Where large files may be written that need not be kept."""
    kept: Path | None = None
    """Where a file outlives the session; None: nowhere here (Colab without Drive)."""
    input: Path | None = None
    """Where the host mounts data sets; None where it has no such folder."""
    cpu_count: int = 1
    """CPUs this process may keep busy (affinity and container quota counted)."""
    memory: int = 0
    """Bytes of memory this process may use; 0 when unknown."""
    tpu: bool = False
    """Whether a TPU was seen."""
    tpu_reason: str = ""
    """What it was seen by."""
    is_rank: bool = False
    """Whether torchrun, Slurm or Ray started this process as a rank: a launch runs in place."""
    rank_reason: str = "no torchrun, Slurm step or Ray worker started this process"
    """Why :attr:`is_rank` is what it is."""
    rank: int = 0
    """Which rank, where :attr:`is_rank`; the next three likewise."""
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    def explain(self) -> str:
        """The verdicts and their reasons as text, one a line."""
        rows = (f"  {name}: {text}" for name, text in self._rows())
        return "\n".join([f"{self.kind}: {self.reason}", *rows])

    def _repr_html_(self) -> str:
        return html_table(f"host: {self.kind}", [("because", self.reason), *self._rows()])

    def _rows(self) -> list[tuple[str, str]]:
        memory = gib(self.memory) if self.memory else "unknown"
        return [
            ("CPUs, memory", f"{self.cpu_count}, {memory}"),
            ("results", str(self.working)),
            ("scratch", str(self.scratch)),
            ("kept", str(self.kept or "nothing outlives the session: mount Google Drive")),
            ("input", str(self.input) if self.input else "none"),
            ("TPU", self.tpu_reason if self.tpu else "none seen"),
            ("started as a rank", f"{'yes' if self.is_rank else 'no'}: {self.rank_reason}"),
        ]


def detect_host(
    environ: Mapping[str, str] | None = None,
    *,
    root: Path = ROOT,
    modules: Mapping[str, Any] | None = None,
    cwd: Path | None = None,
    affinity: int | None = None,
) -> Host:
    """Find out where this process runs: reads variables and files, imports and changes nothing.

    ``NBTOOLKIT_HOST`` (``kaggle``, ``colab``, ``jupyter``, ``script`` or ``slurm``) overrides it.

    Args:
        environ: the environment variables; default: this process's.
        root: where ``/kaggle``, ``/content``, ``/proc``, ``/sys`` and ``/dev`` are looked for.
        modules: the modules imported so far; default: this process's.
        cwd: the working directory; default: this process's.
        affinity: CPUs in the affinity mask; default: asked from the system.

    Raises:
        ConfigError: ``NBTOOLKIT_HOST`` names no known kind of host.
    """
    environ = os.environ if environ is None else environ
    modules = sys.modules if modules is None else modules
    kernel = in_kernel(modules)
    kind, reason = _kind(environ, root, modules, kernel)
    working, scratch, data = _folders(kind, environ, root, cwd or _cwd())
    tpu_reason = _tpu(environ, root)
    return Host(
        kind=kind,
        reason=reason,
        working=working,
        scratch=scratch,
        kept=_kept(kind, root, working),
        input=data,
        cpu_count=cpu_count(root, affinity),
        memory=memory_limit(root),
        tpu=bool(tpu_reason),
        tpu_reason=tpu_reason,
        **_started_as(environ, kernel),
    )


def in_kernel(modules: Mapping[str, Any]) -> bool:
    """Whether this process is an IPython kernel (an IPython terminal is not); imports nothing."""
    get_ipython = getattr(modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    return getattr(shell, "kernel", None) is not None


def _kind(
    environ: Mapping[str, str], root: Path, modules: Mapping[str, Any], kernel: bool
) -> tuple[HostKind, str]:
    kind, reason = _detected(environ, root, modules, kernel)
    asked = environ.get("NBTOOLKIT_HOST")
    if not asked:
        return kind, reason
    if asked not in get_args(HostKind):
        raise _unknown_kind(asked)
    return cast(HostKind, asked), f"NBTOOLKIT_HOST says so (without it: {kind}, {reason})"


def _detected(
    environ: Mapping[str, str], root: Path, modules: Mapping[str, Any], kernel: bool
) -> tuple[HostKind, str]:
    # Kaggle first: its image is built on Colab's (docker-python 78aaa43) and carries Colab's marks.
    run_type = environ.get("KAGGLE_KERNEL_RUN_TYPE")
    if run_type and (root / "kaggle/working").is_dir():
        return "kaggle", f"KAGGLE_KERNEL_RUN_TYPE={run_type} is set and /kaggle/working exists"
    if "google.colab" in modules:
        return "colab", "google.colab is imported in this process"
    if "COLAB_RELEASE_TAG" in environ and (root / "content").is_dir():
        return "colab", "COLAB_RELEASE_TAG is set and /content exists"
    job = environ.get("SLURM_JOB_ID")
    if kernel:
        inside = f", inside Slurm job {job}" if job else ""
        return "jupyter", f"this process is an IPython kernel{inside}{_not_kaggle(environ)}"
    if job:
        return "slurm", f"SLURM_JOB_ID={job} is set and there is no kernel"
    return "script", f"no kernel, no Slurm job, no mark of Kaggle or Colab{_not_kaggle(environ)}"


def _not_kaggle(environ: Mapping[str, str]) -> str:
    """A note where a variable looks like Kaggle's: the client's KAGGLE_USERNAME, on a laptop."""
    seen = sorted(name for name in environ if name.startswith("KAGGLE_"))
    needs = "not Kaggle: that needs KAGGLE_KERNEL_RUN_TYPE and /kaggle/working"
    return f" ({seen[0]} is set, but this is {needs})" if seen else ""


def _unknown_kind(asked: str) -> ConfigError:
    near = get_close_matches(asked, get_args(HostKind), n=1)
    return ConfigError(
        f"the environment variable NBTOOLKIT_HOST={asked!r} names no kind of host",
        allowed=", ".join(get_args(HostKind)),
        do=f"set it to {near[0]!r}" if near else "unset it, and the host is detected",
    )


def _cwd() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory of this process has been deleted",
            allowed="a working directory that is there",
            do="change to another one: os.chdir(...), or %cd in a cell",
        ) from None


def _folders(
    kind: HostKind, environ: Mapping[str, str], root: Path, cwd: Path
) -> tuple[Path, Path, Path | None]:
    """Where to keep results, where to put large passing files, where data sets are mounted."""
    home: dict[str, Path] = {"kaggle": root / "kaggle/working", "colab": root / "content"}
    data = root / "kaggle/input" if kind == "kaggle" else None
    working = _first_writable([home.get(kind, cwd), cwd])
    # Kaggle keeps 19.5 GB in /kaggle/working, /tmp has about 1 TB (measured in unsloth PR 8439)
    named = [Path(environ[name]) for name in ("SLURM_TMPDIR", "TMPDIR") if environ.get(name)]
    own = [root / "kaggle/tmp"] if kind == "kaggle" else []
    scratch = _first_writable([*named, *own, root / "tmp", working])
    return working, scratch, data if data and data.is_dir() else None


def _kept(kind: HostKind, root: Path, working: Path) -> Path | None:
    """Where a file outlives the session: Colab's own disk does not, a mounted Drive does."""
    if kind != "colab":
        return working
    drive = root / "content/drive/MyDrive"
    return drive if drive.is_dir() else None


def _first_writable(folders: Iterable[Path]) -> Path:
    for folder in folders:
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return Path(tempfile.gettempdir())


def _tpu(environ: Mapping[str, str], root: Path) -> str:
    """What a TPU was seen by; empty when none was seen."""
    if environ.get("PJRT_DEVICE", "").upper() == "TPU":
        return "PJRT_DEVICE=TPU"
    for name in _TPU_NAMES:
        if environ.get(name):
            return f"{name}={environ[name]}"
    # /dev/accel0 is a TPU; the folder /dev/accel/ is Linux's place for other accelerators
    chips = sorted((root / "dev").glob("accel[0-9]*"))
    return f"/dev/{chips[0].name}" if chips else ""


def _started_as(environ: Mapping[str, str], kernel: bool) -> dict[str, Any]:
    """The fields of a Host that say whether this process was started as a rank, and as which."""
    found = _torch_rank(environ) or _slurm_rank(environ)
    if found and kernel:  # a kernel is nobody's rank: its server's variables came down to it
        return {"rank_reason": f"{found['rank_reason']}, but stale: a kernel is no rank"}
    return found


def _torch_rank(environ: Mapping[str, str]) -> dict[str, Any]:
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or world is None:
        return {}
    elastic = "TORCHELASTIC_RUN_ID" in environ
    by = "torchrun (TORCHELASTIC_RUN_ID is set)" if elastic else "variables"
    return {
        "is_rank": True,
        "rank_reason": f"{by}: RANK={rank}, WORLD_SIZE={world}",
        "rank": rank,
        "local_rank": _number(environ, "LOCAL_RANK") or 0,
        "world_size": world,
        "local_world_size": _number(environ, "LOCAL_WORLD_SIZE") or 1,
    }


def _slurm_rank(environ: Mapping[str, str]) -> dict[str, Any]:
    """A task of an ``srun`` step with several tasks; the batch script itself is in no step."""
    rank, tasks = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if rank is None or tasks is None or tasks < 2:
        return {}
    return {
        "is_rank": True,
        "rank_reason": f"srun: SLURM_PROCID={rank}, SLURM_STEP_NUM_TASKS={tasks}",
        "rank": rank,
        "local_rank": _number(environ, "SLURM_LOCALID") or 0,
        "world_size": tasks,
        "local_world_size": _tasks_here(environ) or 1,
    }


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Tasks of the step on this node: of ``SLURM_STEP_TASKS_PER_NODE=2(x3),1`` node 3 has one."""
    counts = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(found[1])] * int(found[2] or 1)
    node = _number(environ, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None
