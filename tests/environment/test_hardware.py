"""Hardware detection: visible and usable GPUs with reasons, without importing torch or CUDA."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from machines import (
    A100,
    CPU_BUILD,
    CU124,
    CU130,
    H100,
    P100,
    RTX_PRO,
    T4,
    V100,
    Card,
    Nvml,
    cpu_machine,
    machine,
    uuid_of,
)

from nbtoolkit.environment.hardware import (
    Device,
    Hardware,
    TorchBuild,
    detect_hardware,
    read_torch_build,
    sample_devices,
)

MIG = replace(A100, slices=("MIG-1111", "MIG-2222"))


@pytest.mark.parametrize(
    ("cards", "build", "usable", "reason"),
    [
        pytest.param((T4, T4), CU124, [0, 1], "has code for sm_75", id="Kaggle, two T4"),
        pytest.param((T4, T4), CU130, [0, 1], "has code for sm_75", id="T4, today's torch"),
        pytest.param((P100,), CU130, [], r"no code for sm_60 \(it has sm_75", id="Kaggle, P100"),
        pytest.param((P100,), CU124, [0], "has code for sm_60", id="P100, an old torch"),
        pytest.param((RTX_PRO,), CU130, [0], "has code for sm_120", id="Kaggle, RTX Pro"),
        pytest.param((RTX_PRO,), CU124, [], "no code for sm_120", id="RTX Pro, an old torch"),
        pytest.param((H100,), CU130, [0], "has code for sm_90", id="H100"),
        pytest.param((V100,), CU130, [], "choose another accelerator", id="V100"),
        pytest.param((T4, P100), CU130, [0], "has code for sm_75", id="a mixed pair"),
        pytest.param((T4,), CPU_BUILD, [], "built without CUDA: install", id="CPU build of torch"),
        pytest.param((T4,), None, [], "torch is not installed", id="no torch"),
    ],
)
def test_usable_or_not(
    cards: tuple[Card, ...], build: TorchBuild | None, usable: list[int], reason: str
) -> None:
    found = machine(*cards, build=build)
    assert [device.index for device in found.usable] == usable
    assert [device.index for device in found.devices] == list(range(len(cards)))
    assert re.search(reason, found.devices[0].reason)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_75", (7, 5), True),
        ("sm_80", (8, 9), True),  # a newer minor version
        ("sm_86", (8, 0), False),  # an older one
        ("sm_80", (9, 0), False),  # binary code does not cross major versions
        ("compute_90", (12, 0), True),  # PTX does
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),  # bound to exactly this one
        ("compute_90a", (12, 0), False),
        ("sm_100f", (10, 3), True),  # bound to the family
        ("sm_100f", (12, 0), False),
        ("gfx942", (9, 0), False),  # AMD
    ],
)
def test_which_code_runs_where(arch: str, capability: tuple[int, int], runs: bool) -> None:
    build = TorchBuild(version="x", cuda="13.0", arch=(arch,))
    assert build.runs_on(capability) is runs


def test_an_unknown_list_counts_as_usable_and_says_so() -> None:
    (device,) = machine(P100, build=replace(CU130, arch=())).devices
    assert device.usable
    assert "has code for unknown architectures" in device.reason


@pytest.mark.parametrize(
    ("driver", "usable"),
    [(12_040, False), (13_000, True), (13_010, True), (14_000, True), (None, True)],
)
def test_a_driver_older_than_torchs_cuda_is_named(driver: int | None, usable: bool) -> None:
    found = detect_hardware({}, Nvml(T4, driver=driver), torch_build=CU130)
    assert found.devices[0].usable is usable
    if not usable:
        assert "runs CUDA up to 12.4" in found.devices[0].reason
        assert "needs 13.0: update the driver" in found.devices[0].reason


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, [0, 1, 2]),
        ("0", [0]),
        ("2,0", [2, 0]),  # its order counts
        (" 1 , 2 ", [1, 2]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),  # the first that fits nothing hides all after it
        ("0,7,1", [0]),
        ("NoDevFiles", []),  # Slurm, without a GPU
        ("1,1", []),  # named twice
        ("1gpu2,2", [1, 2]),  # CUDA reads the digits a word begins with
        (uuid_of(2), [2]),
        (f"{uuid_of(1)},{uuid_of(0)}", [1, 0]),
        ("GPU-b", [1]),  # a unique beginning
        ("GPU-", []),  # not unique
        ("GPU-zzz", []),
        (f"{uuid_of(0)},1", [0]),  # the first entry decides how all are read
        (f"0,{uuid_of(1)}", [0]),
    ],
)
def test_cuda_visible_devices(mask: str | None, seen: list[int]) -> None:
    found = machine(T4, T4, T4, mask=mask)
    assert [device.uuid for device in found.devices] == [uuid_of(index) for index in seen]
    assert [device.index for device in found.devices] == list(range(len(seen)))  # cuda:0, ...
    expected = f"CUDA_VISIBLE_DEVICES={mask!r} shows {len(seen)} of 3" if mask is not None else "3"
    assert expected in found.reason


def test_unlike_gpus_chosen_by_number_carry_a_warning() -> None:
    assert "CUDA_DEVICE_ORDER" in machine(T4, A100, mask="0").reason
    assert "CUDA_DEVICE_ORDER" not in machine(T4, T4, mask="0").reason
    sure = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert "set" not in detect_hardware(sure, Nvml(T4, A100), torch_build=CU130).reason


def test_mig_slices_stand_for_their_gpu() -> None:
    found = machine(T4, MIG)
    assert [device.uuid for device in found.devices] == [uuid_of(0), "MIG-1111", "MIG-2222"]
    assert found.devices[1].capability == (8, 0)
    assert found.devices[1].is_slice
    assert "one process only" in found.devices[1].reason


@pytest.mark.parametrize(
    ("mask", "seen"),
    [("MIG-2222", ["MIG-2222"]), ("MIG-2", ["MIG-2222"]), ("1", ["MIG-1111", "MIG-2222"])],
)
def test_mig_slices_under_cuda_visible_devices(mask: str, seen: list[str]) -> None:
    assert [device.uuid for device in machine(T4, MIG, mask=mask).devices] == seen


def test_mig_without_a_slice_is_not_usable() -> None:
    found = machine(replace(A100, slices=()))
    assert not found.usable
    assert "MIG is on but has no slice" in found.devices[0].reason


def test_a_lost_gpu_does_not_take_the_others_along() -> None:
    found = machine(T4, replace(T4, lost=True))
    assert [device.usable for device in found.devices] == [True, False]
    assert "GPU is lost" in found.devices[1].reason


def test_shared_memory_is_no_obstacle() -> None:
    (device,) = machine(replace(H100, says_memory=False)).devices
    assert device.usable
    assert device.memory_total == 0
    assert "shared memory" in str(device)


def test_without_a_driver_there_are_no_devices_and_a_reason() -> None:
    found = cpu_machine(cpus=3)
    assert found.devices == ()
    assert found.reason == "no NVIDIA driver answers (NVML Shared Library Not Found)"
    assert found.cpu_count == 3
    assert "0 usable of 0 visible GPUs: no NVIDIA driver" in found.explain()


def test_a_driver_without_gpus() -> None:
    assert detect_hardware({}, Nvml(), torch_build=CU130).reason.endswith("has no GPU")


def test_nvml_is_shut_down_again() -> None:
    nvml = Nvml(T4)
    detect_hardware({}, nvml, torch_build=CU130)
    sample_devices((), nvml)
    assert nvml.sessions == 0


def test_samples() -> None:
    nvml = Nvml(T4, replace(T4, free=4_000_000_000), MIG)
    everything = sample_devices((), nvml)
    assert [sample["index"] for sample in everything] == [0, 1, 2]
    (second,) = sample_devices([uuid_of(1)], nvml)
    assert second == {
        "index": 0,
        "uuid": uuid_of(1),
        "utilization": 87,
        "memory_used": T4.total - 4_000_000_000,
        "memory_total": T4.total,
        "power": 63.5,
        "temperature": 71,
    }
    assert sample_devices([1], nvml)[0]["uuid"] == uuid_of(1)


def test_a_sample_leaves_out_what_the_driver_does_not_tell() -> None:
    (sample,) = sample_devices(["MIG-1111"], Nvml(MIG))
    assert "utilization" not in sample
    assert sample["temperature"] == 71


def test_no_samples_without_a_driver_or_for_a_lost_gpu() -> None:
    assert sample_devices((), Nvml(broken="Driver Not Loaded")) == []
    assert sample_devices([0], Nvml(replace(T4, lost=True))) == []


def test_explain_and_html_tell_every_device_and_escape() -> None:
    card = replace(T4, name="<b>T4</b>", free=3 * 2**30)
    found = machine(card, P100)
    text, html = found.explain(), found._repr_html_()
    assert text.splitlines()[0] == "1 usable of 2 visible GPUs: NVML shows 2"
    assert "GPU 0 (<b>T4</b>, 15.0 GiB, sm_75): usable, 3.0 GiB free" in text
    assert "NOT usable" in text
    assert "&lt;b&gt;T4&lt;/b&gt;" in html
    assert "<b>T4" not in html
    assert "color" not in html


def test_frozen() -> None:
    found = machine(T4)
    with pytest.raises(AttributeError):
        found.devices[0].usable = False  # type: ignore[misc]
    assert found == machine(T4)
    assert isinstance(found, Hardware)
    assert isinstance(found.devices[0], Device)


def test_this_machine() -> None:
    found = detect_hardware(environ={})
    assert bool(found.devices) == Path("/dev/nvidiactl").exists()
    assert found.cpu_count >= 1
    assert found.memory > 2**28
    assert found.reason


def test_detection_imports_neither_torch_nor_cuda() -> None:
    code = (
        "import sys; from machines import *;"
        "found = detect_hardware({}, Nvml(T4));"  # the installed torch is judged
        "assert found.devices[0].reason.startswith('torch '), found;"
        "assert not {'torch', 'numpy', 'IPython'} & set(sys.modules)"
    )
    done = _python(code, cwd=Path(__file__).parents[1] / "support")
    assert done.returncode == 0, done.stderr


def test_a_missing_pynvml_gives_the_install_line() -> None:
    code = (
        "import sys; sys.modules['pynvml'] = None;"
        "from nbtoolkit.environment.hardware import detect_hardware as d; print(d().reason)"
    )
    done = _python(code)
    assert done.stdout.strip() == "nvidia-ml-py is not installed: pip install nvidia-ml-py"


def test_the_installed_torch_is_read_as_it_sees_itself() -> None:
    # in a process of its own: _cuda_getArchFlags spoils later forks of the process that calls it
    code = (
        "import torch; flags = getattr(torch._C, '_cuda_getArchFlags', lambda: None)() or '';"
        "print(repr((torch.__version__, torch.version.cuda, tuple(flags.split()))))"
    )
    build = read_torch_build()
    assert build is not None
    assert _python(code).stdout.strip() == repr((build.version, build.cuda, build.arch))
    # the build is in torch's own version, and with some wheels in the metadata's
    assert build.version.partition("+")[0] == version("torch").partition("+")[0]


def test_a_torch_folder_is_read_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "version.py").write_text(
        "from typing import Optional\nraise SystemExit\n__version__ = '2.6.0+cu124'\n"
        "cuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
    )
    library = tmp_path / "lib" / "libtorch_python.so"
    assert read_torch_build(tmp_path) == replace(CU124, arch=())
    library.write_bytes(b"")
    assert read_torch_build(tmp_path) == replace(CU124, arch=())
    library.write_bytes(b"\x7fELF sm_99 \0sm_1\0 x\0" + " ".join(CU124.arch).encode() + b"\0tail")
    assert read_torch_build(tmp_path) == CU124
    assert read_torch_build(tmp_path / "nowhere") is None


def _python(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=cwd
    )
