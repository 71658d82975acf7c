"""Host detection: kind, folders, limits and launch by other tools, each with its reason."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbtoolkit.errors import ConfigError
from nbtoolkit.host import Host, cpu_count, detect_host, memory_limit

KERNEL = {"IPython": SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))}
TERMINAL = {"IPython": SimpleNamespace(get_ipython=lambda: SimpleNamespace())}
NO_SHELL = {"IPython": SimpleNamespace(get_ipython=lambda: None)}  # imported, not running
COLAB = {**KERNEL, "google.colab": SimpleNamespace()}

ON_KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
}
UNEVEN = {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("tmp", "home", "dev", "proc", "sys/fs/cgroup"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def at(
    root: Path,
    environ: dict[str, str] | None = None,
    modules: dict[str, Any] | None = None,
    folders: tuple[str, ...] = (),
) -> Host:
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return detect_host(environ or {}, root=root, modules=modules or {}, cwd=root / "home")


@pytest.mark.parametrize(
    ("environ", "modules", "folders", "kind", "reason"),
    [
        (ON_KAGGLE, KERNEL, ("kaggle/working",), "kaggle", "RUN_TYPE=Interactive is set"),
        # Save & Run All; and Kaggle's image is built on Colab's
        (
            {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab_20260514"},
            COLAB,
            ("kaggle/working", "content"),
            "kaggle",
            "RUN_TYPE=Batch is set",
        ),
        (ON_KAGGLE, {}, ("kaggle/working",), "kaggle", "/kaggle/working exists"),  # !python x.py
        # the client's variables on a laptop, and a run type without Kaggle's folder
        ({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "k"}, KERNEL, (), "jupyter", "KAGGLE_KEY is set"),
        ({"KAGGLE_USERNAME": "me"}, {}, (), "script", "this is not Kaggle"),
        (ON_KAGGLE, {}, (), "script", "this is not Kaggle"),
        ({}, KERNEL, ("kaggle/working",), "jupyter", "IPython kernel"),
        ({}, COLAB, (), "colab", "google.colab is imported"),
        ({"COLAB_RELEASE_TAG": "r"}, {}, ("content",), "colab", "COLAB_RELEASE_TAG is set"),
        ({"COLAB_RELEASE_TAG": "r"}, {}, (), "script", "no kernel"),
        ({}, KERNEL, (), "jupyter", "this process is an IPython kernel"),
        ({}, TERMINAL, (), "script", "no kernel"),
        ({}, NO_SHELL, (), "script", "no kernel"),
        ({}, {}, (), "script", "no kernel"),
        ({"SLURM_JOB_ID": "77"}, {}, (), "slurm", "SLURM_JOB_ID=77"),
        ({"SLURM_JOB_ID": "77"}, KERNEL, (), "jupyter", "inside Slurm job 77"),
        (TORCHRUN, {}, (), "script", "no kernel"),
    ],
)
def test_kind_and_reason(
    root: Path,
    environ: dict[str, str],
    modules: dict[str, Any],
    folders: tuple[str, ...],
    kind: str,
    reason: str,
) -> None:
    host = at(root, environ, modules, folders)
    assert host.kind == kind
    assert reason in host.reason


def test_the_verdict_can_be_overridden_and_says_so(root: Path) -> None:
    host = at(root, {"NBTOOLKIT_HOST": "kaggle"}, KERNEL)
    assert host.kind == "kaggle"
    assert host.reason.startswith("NBTOOLKIT_HOST is set (without it: jupyter")
    assert host.working == root / "home"  # there is no /kaggle/working


@pytest.mark.parametrize(
    ("value", "advice"), [("kagle", "set it to 'kaggle'"), ("mars", "unset it")]
)
def test_an_unknown_override_is_refused(root: Path, value: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"NBTOOLKIT_HOST='{value}' names no kind") as caught:
        at(root, {"NBTOOLKIT_HOST": value})
    assert caught.value.allowed == "kaggle, colab, jupyter, script, slurm"
    assert advice in caught.value.do


def test_kaggles_folders(root: Path) -> None:
    host = at(root, ON_KAGGLE, KERNEL, ("kaggle/working", "kaggle/input"))
    assert host.working == root / "kaggle/working"
    assert host.kept == root / "kaggle/working"
    assert host.scratch == root / "tmp"
    assert host.input == root / "kaggle/input"
    (root / "kaggle/tmp").mkdir()
    assert at(root, ON_KAGGLE, KERNEL).scratch == root / "kaggle/tmp"


def test_colabs_folders(root: Path) -> None:
    host = at(root, {}, COLAB, ("content",))
    assert (host.working, host.input) == (root / "content", None)
    assert host.kept is None
    assert "kept: nothing outlives the session: mount Google Drive" in host.explain()
    mounted = at(root, {}, COLAB, ("content/drive/MyDrive",))
    assert (mounted.working, mounted.kept) == (root / "content", root / "content/drive/MyDrive")


def test_folders_elsewhere(root: Path) -> None:
    (root / "node").mkdir()
    host = at(root, {"SLURM_JOB_ID": "1", "SLURM_TMPDIR": str(root / "node")})
    assert (host.working, host.scratch, host.input) == (root / "home", root / "node", None)
    assert host.kept == host.working


def test_a_folder_that_is_not_there_is_not_offered(root: Path) -> None:
    (root / "tmp").rmdir()
    host = at(root, {"TMPDIR": str(root / "gone")})
    assert host.scratch == root / "home"
    (root / "home").rmdir()
    nowhere = at(root, {"TMPDIR": str(root / "gone")})
    assert nowhere.working == nowhere.scratch == Path(tempfile.gettempdir())


@pytest.mark.parametrize("modules", [{}, TERMINAL])
@pytest.mark.parametrize(
    ("environ", "by", "rank", "world", "local", "local_world"),
    [
        (TORCHRUN, "torchrun (TORCHELASTIC_RUN_ID is set): RANK=3", 3, 4, 1, 2),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "variables: RANK=0, WORLD_SIZE=2", 0, 2, 0, 1),  # Ray
        (SRUN, "srun: SLURM_PROCID=2", 2, 4, 0, 1),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4"}, "srun: SLURM_PROCID=2", 2, 4, 0, 4),
        ({**SRUN, **UNEVEN, "SLURM_NODEID": "1"}, "srun: SLURM_PROCID=2", 2, 4, 0, 2),
        ({**SRUN, **UNEVEN, "SLURM_NODEID": "2"}, "srun: SLURM_PROCID=2", 2, 4, 0, 1),
    ],
)
def test_started_as_a_rank(
    root: Path,
    environ: dict[str, str],
    modules: dict[str, Any],
    by: str,
    rank: int,
    world: int,
    local: int,
    local_world: int,
) -> None:
    host = at(root, environ, modules)
    assert host.is_rank
    assert by in host.rank_reason
    assert (host.rank, host.world_size) == (rank, world)
    assert (host.local_rank, host.local_world_size) == (local, local_world)


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_in_a_kernel_the_same_variables_are_stale(root: Path, environ: dict[str, str]) -> None:
    host = at(root, environ, KERNEL)
    assert not host.is_rank
    assert "stale: a kernel is not a rank" in host.rank_reason
    assert (host.rank, host.world_size) == (0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"RANK": "zero", "WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_not_started_as_a_rank(root: Path, environ: dict[str, str]) -> None:
    host = at(root, environ)
    assert not host.is_rank
    assert host.rank_reason.startswith("no torchrun")


@pytest.mark.parametrize(
    ("environ", "device", "seen_by"),
    [
        ({"TPU_NAME": "local"}, "", "TPU_NAME=local"),
        ({"PJRT_DEVICE": "TPU"}, "", "PJRT_DEVICE=TPU"),
        ({"PJRT_DEVICE": "CUDA"}, "", ""),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, "", "COLAB_TPU_ADDR=10.0.0.2:8470"),
        ({}, "accel0", "/dev/accel0"),
        ({}, "accel", ""),  # Linux's folder for other accelerators
        ({}, "null", ""),
    ],
)
def test_tpu(root: Path, environ: dict[str, str], device: str, seen_by: str) -> None:
    if device:
        (root / "dev" / device).touch()
    host = at(root, environ)
    assert host.tpu is bool(seen_by)
    assert host.tpu_reason == seen_by


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "3200000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cpus_are_cut_by_the_containers_quota(
    root: Path, eight_cpus: None, files: dict[str, str], cpus: int
) -> None:
    write(root / "sys/fs/cgroup", files)
    assert cpu_count(root) == cpus


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, 24_684_092 * 1024),
        ({"memory.max": "max"}, 24_684_092 * 1024),
        ({"memory.max": "2147483648"}, 2**31),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, 24_684_092 * 1024),
        ({"memory/memory.limit_in_bytes": "1073741824"}, 2**30),
    ],
)
def test_memory_is_cut_by_the_containers_limit(
    root: Path, files: dict[str, str], memory: int
) -> None:
    (root / "proc/meminfo").write_text("MemTotal:       24684092 kB\nMemFree:  1 kB\n")
    write(root / "sys/fs/cgroup", files)
    assert memory_limit(root) == memory


def test_a_limit_counts_at_every_level_of_the_own_group(root: Path, eight_cpus: None) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/user/session\n")
    groups = {
        "user/memory.max": "4000",
        "user/session/memory.max": "max",
        "elsewhere/memory.max": "1",
        "memory/a/b/memory.limit_in_bytes": "3000",
        "cpu/a/cpu.cfs_quota_us": "300000",
        "cpu/a/cpu.cfs_period_us": "100000",
    }
    write(root / "sys/fs/cgroup", groups)
    assert memory_limit(root) == 3000
    assert cpu_count(root) == 3


def test_unknown_memory_is_zero(root: Path) -> None:
    assert memory_limit(root) == 0
    assert "unknown" in at(root).explain()


def test_explain_and_html_give_every_verdict_and_escape(root: Path) -> None:
    host = at(root, {"KAGGLE_<b>": "x", "TPU_NAME": "<i>"}, KERNEL)
    text, html = host.explain(), host._repr_html_()
    for part in ("jupyter: this process", "TPU: TPU_NAME=<i>", "started as a rank: no", "results"):
        assert part in text
    assert "KAGGLE_&lt;b&gt; is set" in html
    assert "TPU_NAME=&lt;i&gt;" in html
    assert "<i>" not in html
    assert "color" not in html


def test_frozen(root: Path) -> None:
    with pytest.raises(AttributeError):
        at(root).kind = "kaggle"  # type: ignore[misc]


def test_this_process() -> None:
    host = detect_host({})
    assert host.working == Path.cwd()
    assert host.scratch.is_dir()
    assert host.cpu_count >= 1
    assert host.memory > 2**28


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n")
