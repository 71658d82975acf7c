"""The fork server imports modules before ranks need them, and none that breaks forks."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from kernels import script
from preloading import SMALL, UNSAFE, launch_until, tell_and_import

import nbtoolkit as nb
from nbtoolkit.environment.installed import ImportRecorder, environment_key

# Installed with scikit-learn: one file, that imports nothing which is installed.
ALONE = "threadpoolctl"


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    return nb.load_config(
        env=None, overrides={"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    )


def test_what_a_rank_imports_is_there_in_a_later_launch(config: nb.Config) -> None:
    assert launch_until(SMALL, config)


def test_ranks_have_no_frames_of_the_branches_before_theirs(config: nb.Config) -> None:
    """Seven for each: after 140 branches every launch of a kernel failed with RecursionError."""

    def depth(config: nb.Config, ctx: nb.RunContext) -> int:
        import traceback

        return sum(1 for _ in traceback.walk_stack(None))

    depths = []
    for name in (SMALL, ALONE, "cycler"):
        assert launch_until(name, config)
        result = nb.launch(depth, config, processes=1, resume="never", display="off")
        depths.append(result.value)
    assert len(set(depths)) == 1, depths


def test_a_changed_environment_is_not_served_from_old_imports(
    config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch_until(SMALL, config)
    monkeypatch.setenv("NBTOOLKIT_TEST_SETTING", "1")
    assert not tell_and_import(SMALL, config)


def test_what_is_only_looked_for_is_not_imported_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._dynamo looks for pandas and scikit-learn, and needs neither."""
    told: list[str] = []
    monkeypatch.setattr(sys, "meta_path", [ImportRecorder(told.extend), *sys.meta_path])
    monkeypatch.delitem(sys.modules, ALONE, raising=False)
    assert importlib.util.find_spec(ALONE) is not None
    assert told == []
    importlib.import_module(ALONE)
    assert told == [ALONE]


BREAKS_FORKS = """
import sys
from preloading import SMALL, UNSAFE, launch_until, tell_and_import

config = nb.load_config(
    env=None, overrides={"tracking.mlflow": False, "runtime.output_dir": "out"}
)
assert not tell_and_import(UNSAFE, config)
assert launch_until(SMALL, config), "a module that is refused must not keep others out"
assert not tell_and_import(UNSAFE, config)
print("left to the ranks")
"""


@pytest.mark.long
def test_a_module_that_breaks_forks_is_left_to_the_ranks(tmp_path: Path) -> None:
    """It is installed for one user, in a folder of the test's: others share this environment."""
    installed = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(tmp_path)}))
    installed.mkdir(parents=True)
    # computes in parallel when it is imported: a fork of its importer hangs
    (installed / f"{UNSAFE}.py").write_text(
        "import torch\ntorch.set_num_threads(2)\nx = torch.ones(900, 900)\n(x @ x).exp()\n"
    )
    path = os.pathsep.join([str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    user = {"PYTHONUSERBASE": str(tmp_path), "PYTHONPATH": path}
    with script(BREAKS_FORKS, tmp_path, **user) as kernel:
        out, err = kernel.end(240)
    assert (kernel.process.returncode, out) == (0, "left to the ranks\n"), err


def test_modules_of_the_working_directory_are_never_imported_ahead(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not tell_and_import("my_own_module", config)
    assert launch_until(SMALL, config)
    assert not tell_and_import("my_own_module", config)


def test_environment_key_ignores_what_says_nothing() -> None:
    base = {"HF_HOME": "/a", "PWD": "/x"}
    assert environment_key(base) == environment_key({"HF_HOME": "/a", "PWD": "/y"})
    # pytest sets it again for each test
    running = {**base, "PYTEST_CURRENT_TEST": "test_it (call)"}
    assert environment_key(base) == environment_key(running)
    assert environment_key(base) != environment_key({"HF_HOME": "/b", "PWD": "/x"})


def test_environment_key_ignores_what_libraries_set_for_themselves() -> None:
    """As in a kernel that imports scikit-learn or makes an optimizer between two launches."""
    key = environment_key({})
    own = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
    assert environment_key({**own, "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me"}) == key
    assert environment_key({"KMP_INIT_AT_FORK": "TRUE"}) != key
    assert environment_key({"TORCHINDUCTOR_CACHE_DIR": "/mine"}) != key
