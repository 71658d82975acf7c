"""The ranks have the settings of the kernel's process that a fork would pass on."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import SECONDS, START, Notebook, shared_notebook

import nbtoolkit as nb
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.wire.payload import pack_function

SET_UP = """
import logging, sys
assert "torch" not in sys.modules
config = nb.load_config("config.json", env=None)

def settings(config, ctx):
    import torch
    return [str(torch.get_default_dtype()), torch.get_deterministic_debug_mode(),
            torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32, str(torch.get_autocast_dtype("cpu")),
            logging.root.level, logging.getLogger("mine").level, logging.root.manager.disable]

def writes(config, ctx):
    for logger in (logging.getLogger(), logging.getLogger("mine"), logging.getLogger("__main__")):
        logger.debug("debug of %s on rank %s", logger.name, ctx.rank)
        logger.info("info of %s on rank %s", logger.name, ctx.rank)

def run(train, processes=2, **options):
    result = nb.launch(train, config, processes=processes, resume="never", **options)
    return result
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out")}
    config = nb.load_config(env=None, overrides=settings)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.fixture(scope="module")
def kernel(session_leaves_nothing: None, home: Path) -> Iterator[Notebook]:
    """A kernel that has not imported torch."""
    with shared_notebook(home) as running:
        running.run(SET_UP).ok()
        yield running


FACTORY = ["torch.float32", 0, False, "highest", False, "torch.bfloat16", 30, 0, 0]
CHANGED = ["torch.float64", 1, True, "high", True, "torch.float16", 30, 10, 5]


def test_ranks_have_torchs_settings_and_log_levels_of_the_kernel_as_they_are_at_each_launch(
    kernel: Notebook,
) -> None:
    cell = kernel.run("print(run(settings, display='off').values, 'torch' in sys.modules)").ok()
    # A busy machine prints before that it waits for the fork server.
    assert cell.text.endswith(f"{[FACTORY] * 2} False\n")
    kernel.run("""
    import torch
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.set_autocast_dtype("cpu", torch.float16)
    logging.getLogger("mine").setLevel("DEBUG")
    logging.disable(5)
    """).ok()
    cell = kernel.run("""
    print(run(settings, display='off').values)
    of_kernel = settings(config, None)
    def equal(config, ctx):
        assert settings(config, ctx) == of_kernel
        return {"score": 1.0}
    folds = nb.make_folds([0, 1] * 4, k=2)
    print(nb.cross_validate(equal, config, folds, resume="never", display="off").status)
    space = {"optim.lr": {"low": 1e-3, "high": 1.0, "type": "float"}}
    search = {"study": {"metric": "score"}, "space": space}
    found = nb.sweep(equal, config, search, n_trials=3, resume="never", display="off")
    print(list(found.trials["state"]))
    """).ok()
    assert cell.text.splitlines() == [str([CHANGED] * 2), "completed", str(["complete"] * 3)]
    cell = kernel.run("""
    torch.set_default_dtype(torch.float32)
    print(run(settings, display='off').values[1][0], torch.cuda.is_initialized())
    torch.use_deterministic_algorithms(False)
    logging.disable(0)
    """).ok()
    assert cell.text == "torch.float32 False\n"


def test_log_lines_go_where_the_kernels_basic_config_writes_them(
    kernel: Notebook, home: Path
) -> None:
    kernel.run("""
    logging.basicConfig(level="INFO", format="%(levelname)s|%(message)s", force=True)
    to_file = logging.FileHandler("log.txt", mode="w")
    to_file.setLevel("DEBUG")
    logging.getLogger("mine").addHandler(to_file)
    logging.getLogger("mine").setLevel("DEBUG")
    logging.getLogger("mine").propagate = True
    """).ok()
    for _ in range(2):  # the second launch adds no handler twice
        cell = kernel.run("r = run(writes, display='text'); print(r.paths.log(1).read_text())").ok()
        for rank in range(2):
            for name in ("root", "mine", "__main__"):
                assert cell.text.count(f"INFO|info of {name} on rank {rank}") == 1
        assert "DEBUG|" not in cell.text.replace("DEBUG|debug of mine", "")
    lines = (home / "log.txt").read_text().splitlines()
    written = [f"{kind} of mine on rank {rank}" for kind in ("debug", "info") for rank in (0, 1)]
    assert sorted(lines) == sorted(written * 2)


def test_a_function_of_a_cell_that_a_cell_has_set_on_a_module_is_named(kernel: Notebook) -> None:
    cell = kernel.run("""
    import colorsys
    def mine(*rgb):
        return "mine"
    def uses(config, ctx):
        return colorsys.rgb_to_hsv(0, 0, 0)
    print(run(uses, display="off").value)
    colorsys.rgb_to_hsv = mine
    print(run(uses, display="off").value)
    """).ok()
    assert cell.text.count("UserWarning") == 1
    assert "a cell has set colorsys.rgb_to_hsv, and the ranks do not have it" in cell.text
    assert "mine" not in [line.strip() for line in cell.text.splitlines()]


def test_a_function_that_uses_torch_distributed_starts_without_a_warning() -> None:
    """torch warns whenever an attribute of its old name reduce_op is looked at."""
    from torch import distributed

    def uses(config: nb.Config, ctx: nb.RunContext) -> bool:
        return distributed.is_available()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pack_function(uses, kernel_environment()) as payload:
            assert payload > 0


NAMES = """
import os
os.environ.update({changes})
names = [f"class {{n}}" for n in range(20)]
def order(config, ctx):
    return list(set(names))
config = nb.load_config("config.json", env=None)
result = nb.launch(order, config, processes=2, display="off", resume="never")
print(result.values == [order(config, None)] * 2)
"""


@pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.long), {"PYTHONHASHSEED": "3"}]
)
def test_sets_have_the_kernels_order_if_it_was_started_with_a_hash_seed(
    home: Path, changes: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + NAMES.format(changes=changes)],
        cwd=home,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONHASHSEED": "11"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.strip() == "True", done.stderr
