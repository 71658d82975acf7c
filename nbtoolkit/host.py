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

from nbtoolkit.cards import properties_html
from nbtoolkit.errors import ConfigError, LaunchError
from nbtoolkit.text_table import gib

ROOT = Path("/")

COUNTS_SESSIONS = ("kaggle",)
"""Hosts whose quota counts the time of a session, however many of its GPUs are in use."""


def cpu_count(root: Path = ROOT) -> int:
    """Return the number of CPUs of this process: its affinity mask, limited by a container's quota.

    Args:
        root: parent of ``/proc`` and ``/sys``.

    Returns:
        At least 1. A quota of 1.5 CPUs counts as 1, since threads above the quota are throttled.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_cpu_quotas(root)])))


def memory_limit(root: Path = ROOT) -> int:
    """Return the memory of this process in bytes: the machine's or a container's; 0 if unknown."""
    known = [*_machine_memory(root), *_memory_limits(root)]
    return min(known, default=0)


def _machine_memory(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            yield int(line.split()[1]) * 1024  # "MemTotal:   24684092 kB"


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
            value = _text(folder / name).strip()
            # Without a limit it is "max" in version 2, and a huge number in version 1.
            if value.isdigit():
                yield int(value)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _cgroup_folders(root, "cpu"):
        words = _text(folder / "cpu.max").split()  # version 2: "150000 100000" or "max 100000"
        words = words or [
            _text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders of this process and their parents, version 2 and 1.

    Any level may have a limit. Inside a container the path names folders of the host that do not
    exist there, and the container's own limit is at the top.
    """
    top = root / "sys/fs/cgroup"
    paths = {"": "/", controller: "/"}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    for folder, path in ((top, paths[""]), (top / controller, paths[controller])):
        below = PurePosixPath(path.lstrip("/"))
        yield from (folder / part for part in dict.fromkeys((below, *below.parents)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # does not exist, or is not readable
        return ""


HostKind = Literal["kaggle", "colab", "jupyter", "script", "slurm"]

# Set on TPU machines (Kaggle, Colab, Google Cloud), but not by a client on a laptop.
_TPU_NAMES = ("TPU_NAME", "COLAB_TPU_ADDR", "TPU_ACCELERATOR_TYPE")


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of this process, as :func:`detect_host` found it."""

    kind: HostKind
    """``kaggle``, ``colab``, ``jupyter`` (any other IPython kernel), ``slurm`` or ``script``."""
    reason: str
    """The reason for :attr:`kind`."""
    working: Path
    """The folder for results."""
    scratch: Path
    """The folder for large temporary files."""
    kept: Path | None = None
    """The folder whose files outlive the session, or None (Colab without a mounted Drive)."""
    input: Path | None = None
    """The folder in which the host mounts data sets, or None."""
    cpu_count: int = 1
    """The CPUs that this process may use, as its affinity and the container's quota limit them."""
    memory: int = 0
    """Bytes of memory that this process may use; 0 if unknown."""
    tpu: bool = False
    """Whether the machine has a TPU."""
    tpu_reason: str = ""
    """How the TPU was detected; empty without a TPU."""
    watched: bool = True
    """Whether a person may see the run: this process is the kernel of a notebook that is open in a
    front end. Scripts, papermill and Kaggle's batch runs have nobody who could launch again."""
    is_rank: bool = False
    """Whether torchrun, Slurm or Ray started this process as a rank. A launch then runs the
    training function in this process."""
    rank_reason: str = "no torchrun, Slurm step or Ray worker started this process"
    """The reason for :attr:`is_rank`."""
    rank: int = 0
    """The number of this rank, if :attr:`is_rank`."""
    local_rank: int = 0
    """The number of this rank on this machine, if :attr:`is_rank`."""
    world_size: int = 1
    """The number of ranks, if :attr:`is_rank`."""
    local_world_size: int = 1
    """The number of ranks on this machine, if :attr:`is_rank`."""

    def explain(self) -> str:
        """Describe the findings and their reasons, one per line."""
        rows = (f"  {name}: {text}" for name, text in self._rows())
        return "\n".join([f"{self.kind}: {self.reason}", *rows])

    def _repr_html_(self) -> str:
        return properties_html(f"host: {self.kind}", [("because", self.reason), *self._rows()])

    def _rows(self) -> list[tuple[str, str]]:
        memory = gib(self.memory) if self.memory else "unknown"
        return [
            ("CPUs, memory", f"{self.cpu_count}, {memory}"),
            ("results", str(self.working)),
            ("scratch", str(self.scratch)),
            ("kept", str(self.kept or "nothing outlives the session: mount Google Drive")),
            ("input", str(self.input) if self.input else "none"),
            ("TPU", self.tpu_reason if self.tpu else "none detected"),
            ("started as a rank", f"{'yes' if self.is_rank else 'no'}: {self.rank_reason}"),
        ]


def detect_host(
    environ: Mapping[str, str] | None = None,
    *,
    root: Path = ROOT,
    modules: Mapping[str, object] | None = None,
    cwd: Path | None = None,
) -> Host:
    """Detect the host of this process from environment variables, modules and files.

    It imports nothing. If the environment variable ``NBTOOLKIT_HOST`` is ``kaggle``, ``colab``,
    ``jupyter``, ``script`` or ``slurm``, this is the kind of the host.

    Args:
        environ: the environment variables; default: those of this process.
        root: the root of the file system, in which ``/kaggle``, ``/content``, ``/proc``, ``/sys``
            and ``/dev`` are looked for. Only tests pass another folder.
        modules: the imported modules; default: those of this process.
        cwd: the working directory; default: that of this process.

    Raises:
        ConfigError: ``NBTOOLKIT_HOST`` is not a known kind of host.
    """
    environ = os.environ if environ is None else environ
    modules = sys.modules if modules is None else modules
    kernel = in_kernel(modules)
    kind, reason = _host_kind(environ, root, modules, kernel)
    working, scratch, data = _folders(kind, environ, root, cwd or _cwd())
    tpu_reason = _tpu(environ, root)
    return Host(
        kind=kind,
        reason=reason,
        working=working,
        scratch=scratch,
        kept=_kept(kind, root, working),
        input=data,
        cpu_count=cpu_count(root),
        memory=memory_limit(root),
        tpu=bool(tpu_reason),
        tpu_reason=tpu_reason,
        watched=_is_watched(environ, modules),
        **_rank_fields(environ, kernel),
    )


def in_kernel(modules: Mapping[str, object]) -> bool:
    """Return whether this process is an IPython kernel (an IPython terminal is not)."""
    get_ipython = getattr(modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    return getattr(shell, "kernel", None) is not None


def front_end(modules: Mapping[str, Any]) -> bool | None:
    """Return whether the client that sent the kernel's running cell has a user; None: unknown.

    Each request says whether its client can answer an ``input()``: nbclient (and so papermill and
    nbconvert) and nbval cannot; JupyterLab, Notebook, VS Code, Colab and Kaggle's editor can.
    """
    request = modules["IPython"].get_ipython().kernel.get_parent("shell") or {}
    answer = request.get("content", {}).get("allow_stdin")
    return answer if isinstance(answer, bool) else None


def _is_watched(environ: Mapping[str, str], modules: Mapping[str, object]) -> bool:
    batch = environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    return in_kernel(modules) and not batch and front_end(modules) is not False


def _host_kind(
    environ: Mapping[str, str], root: Path, modules: Mapping[str, object], kernel: bool
) -> tuple[HostKind, str]:
    kind, reason = _detected_kind(environ, root, modules, kernel)
    override = environ.get("NBTOOLKIT_HOST")
    if not override:
        return kind, reason
    kinds = get_args(HostKind)
    if override not in kinds:
        close = get_close_matches(override, kinds, n=1)
        raise ConfigError(
            f"the environment variable NBTOOLKIT_HOST={override!r} names no kind of host",
            allowed=", ".join(kinds),
            do=f"set it to {close[0]!r}" if close else "unset it, and the host is detected",
        )
    return cast(HostKind, override), f"NBTOOLKIT_HOST is set (without it: {kind}, {reason})"


def _detected_kind(
    environ: Mapping[str, str], root: Path, modules: Mapping[str, object], kernel: bool
) -> tuple[HostKind, str]:
    # Kaggle first: its image is based on Colab's (docker-python 78aaa43) and has Colab's variables.
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
    return "script", f"no kernel, no Slurm job, no sign of Kaggle or Colab{_not_kaggle(environ)}"


def _not_kaggle(environ: Mapping[str, str]) -> str:
    """Return a note if a variable looks like Kaggle's: the client sets KAGGLE_USERNAME anywhere."""
    names = sorted(name for name in environ if name.startswith("KAGGLE_"))
    needs = "not Kaggle: that needs KAGGLE_KERNEL_RUN_TYPE and /kaggle/working"
    return f" ({names[0]} is set, but this is {needs})" if names else ""


def _cwd() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory of this process has been deleted",
            allowed="an existing working directory",
            do="change to another one: os.chdir(...), or %cd in a cell",
        ) from None


def _folders(
    kind: HostKind, environ: Mapping[str, str], root: Path, cwd: Path
) -> tuple[Path, Path, Path | None]:
    """Return the folders for results, for large temporary files, and of the mounted data sets."""
    home: dict[str, Path] = {"kaggle": root / "kaggle/working", "colab": root / "content"}
    data = root / "kaggle/input" if kind == "kaggle" else None
    working = _first_writable([home.get(kind, cwd), cwd])
    # Kaggle keeps 19.5 GB in /kaggle/working; /tmp has about 1 TB (measured in unsloth PR 8439).
    named = [Path(environ[name]) for name in ("SLURM_TMPDIR", "TMPDIR") if environ.get(name)]
    kaggle = [root / "kaggle/tmp"] if kind == "kaggle" else []
    scratch = _first_writable([*named, *kaggle, root / "tmp", working])
    return working, scratch, data if data and data.is_dir() else None


def _kept(kind: HostKind, root: Path, working: Path) -> Path | None:
    """Return the folder that outlives the session: on Colab only a mounted Drive does."""
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
    """Return how a TPU was detected; empty if there is none."""
    if environ.get("PJRT_DEVICE", "").upper() == "TPU":
        return "PJRT_DEVICE=TPU"
    for name in _TPU_NAMES:
        if environ.get(name):
            return f"{name}={environ[name]}"
    # /dev/accel0 is a TPU; Linux puts other accelerators into the folder /dev/accel/.
    chips = sorted((root / "dev").glob("accel[0-9]*"))
    return f"/dev/{chips[0].name}" if chips else ""


def _rank_fields(environ: Mapping[str, str], kernel: bool) -> dict[str, Any]:
    """Return the fields of a Host about the rank as which this process was started."""
    fields = _torch_rank(environ) or _slurm_rank(environ)
    if fields and kernel:
        # A kernel inherits its server's variables.
        return {"rank_reason": f"{fields['rank_reason']}, but stale: a kernel is not a rank"}
    return fields


def _torch_rank(environ: Mapping[str, str]) -> dict[str, Any]:
    rank = _number(environ, "RANK")
    world = _number(environ, "WORLD_SIZE")
    if rank is None or world is None:
        return {}
    elastic = "TORCHELASTIC_RUN_ID" in environ
    by = "torchrun (TORCHELASTIC_RUN_ID is set)" if elastic else "variables"
    local = _number(environ, "LOCAL_RANK")
    here = _number(environ, "LOCAL_WORLD_SIZE")
    return _started(f"{by}: RANK={rank}, WORLD_SIZE={world}", (rank, world), (local, here))


def _slurm_rank(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a task of an ``srun`` step with several tasks."""
    rank = _number(environ, "SLURM_PROCID")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if rank is None or tasks is None or tasks < 2:
        return {}
    reason = f"srun: SLURM_PROCID={rank}, SLURM_STEP_NUM_TASKS={tasks}"
    local = _number(environ, "SLURM_LOCALID")
    here = _tasks_here(environ)
    return _started(reason, (rank, tasks), (local, here))


def _started(
    reason: str, position: tuple[int, int], on_machine: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Return the fields of a rank, from its rank and world size, in the job and on the machine."""
    return {
        "is_rank": True,
        "rank_reason": reason,
        "rank": position[0],
        "local_rank": on_machine[0] or 0,
        "world_size": position[1],
        "local_world_size": on_machine[1] or 1,
    }


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the step's tasks on this node; for ``2(x3),1`` node 3 has one."""
    counts = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None
