"""The next fork server imports what ranks have imported, and nothing that breaks forks."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from kernels import script, until
from preloading import PACKAGE, UNSAFE, launch_until, tell_and_import

import nbtoolkit as nb
from nbtoolkit.environment.installed import ImportRecorder, environment_key
from nbtoolkit.launcher import fork_servers

# Installed with scikit-learn: one file, that imports nothing which is installed.
ALONE = "threadpoolctl"


def test_what_a_rank_imports_is_there_in_a_later_launch(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no module of the working directory, and nothing in a changed environment."""
    (tmp_path / "my_own_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not tell_and_import("my_own_module", config)
    assert launch_until(PACKAGE, config)
    assert not tell_and_import("my_own_module", config)
    monkeypatch.setenv("NBTOOLKIT_TEST_SETTING", "1")
    assert not tell_and_import(PACKAGE, config)


class WaitsForTheNext:
    """Something that a function captures: while it is pickled, the next fork server takes over."""

    def __reduce__(self) -> tuple[type[WaitsForTheNext], tuple[()]]:
        before = fork_servers.fork_server()
        until(lambda: fork_servers.fork_server() is not before, "the next fork server")
        return WaitsForTheNext, ()


def test_a_fork_server_may_be_replaced_while_a_launch_is_prepared(config: nb.Config) -> None:
    """By the thread of another run: the launch said that this process was exiting."""
    waits = WaitsForTheNext()

    def train(config: nb.Config, ctx: nb.RunContext) -> bool:
        return isinstance(waits, object)

    fork_servers.shutdown()  # a next one of the test before would keep this test's out
    fork_servers.fork_server().wait_until_ready()
    fork_servers.import_ahead([f"not_installed.part_{number}" for number in range(100)])
    assert nb.launch(train, config, processes=1, resume="never", display="off").value


def test_what_is_only_looked_for_is_not_imported_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._dynamo looks for pandas and scikit-learn, and needs neither."""
    recorder = ImportRecorder()
    monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, ALONE, raising=False)
    assert importlib.util.find_spec(ALONE) is not None
    assert recorder.names() == []
    importlib.import_module(ALONE)
    assert recorder.names() == [ALONE]


BREAKS_FORKS = """
import time
from preloading import PACKAGE, UNSAFE, launch_until, tell_and_import
from nbtoolkit.launcher import fork_servers

config = nb.load_config(
    env=None, overrides={"tracking.mlflow": False, "runtime.output_dir": "out"}
)
assert not tell_and_import(UNSAFE, config)
while UNSAFE not in fork_servers._ours().refused:
    time.sleep(0.1)
    fork_servers.take_over()
assert launch_until(PACKAGE, config), "a package that is refused must not keep others out"
assert not tell_and_import(UNSAFE, config)
print("left to the ranks")
"""


def install_for_one_user(home: Path, name: str, code: str) -> dict[str, str]:
    """Install a package of 100 modules in a folder of the test's; others share this environment.

    Returns:
        The variables with which Python finds it.
    """
    packages = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(home)}))
    package = packages / name
    package.mkdir(parents=True)
    for number in range(100):
        (package / f"module_{number}.py").touch()
    modules = "".join(f"from . import module_{number}\n" for number in range(100))
    (package / "__init__.py").write_text(f"{modules}{code}")
    path = os.pathsep.join([str(packages), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {"PYTHONUSERBASE": str(home), "PYTHONPATH": path}


@pytest.mark.long
def test_a_package_that_breaks_forks_is_left_to_the_ranks(tmp_path: Path) -> None:
    # It computes in parallel when it is imported: a fork of its importer hangs.
    code = "import torch\ntorch.set_num_threads(2)\nx = torch.ones(900, 900)\n(x @ x).exp()\n"
    user = install_for_one_user(tmp_path, UNSAFE, code)
    with script(BREAKS_FORKS, tmp_path, **user) as kernel:
        out, err = kernel.end(240)
    assert (kernel.process.returncode, out) == (0, "left to the ranks\n"), err


SLOW = "imports_for_minutes"

IMPORTS_SLOWLY = f"""
import importlib, time

config = nb.load_config(
    env=None, overrides={{"tracking.mlflow": False, "runtime.output_dir": "out"}}
)

def train(config, ctx):
    importlib.import_module({SLOW!r})

nb.launch(train, config, processes=1, display="off")
time.sleep(600)
"""

# A rank imports it at once; where it is imported ahead it writes its pid, and takes minutes.
SLOW_CODE = """
import os, time
if "NBTOOLKIT_RANK" not in os.environ:
    with open({file!r}, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.long
def test_a_fork_server_that_imports_ends_with_its_kernel(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    user = install_for_one_user(tmp_path, SLOW, SLOW_CODE.format(file=str(told)))
    with script(IMPORTS_SLOWLY, tmp_path, **user) as kernel:
        until(lambda: told.exists() and told.read_text().isdigit(), "the next fork server")
        process = Path("/proc") / told.read_text()
        assert process.exists()
        kernel.kill()
        until(lambda: not process.exists(), "its end", 60)


SWEEPS = """
from preloading import PACKAGE

config = nb.load_config(
    env=None, overrides={"tracking.mlflow": False, "runtime.output_dir": "out"}
)

def train(config, ctx):
    import importlib, os, sys, time
    before = PACKAGE in sys.modules
    importlib.import_module(PACKAGE)
    time.sleep(0.5)
    return {"val_loss": float(before)}

sweep = {
    "study": {"sampler": "random", "pruner": "none"},
    "placement": "all_devices_per_trial",
    "space": {"optim.lr": {"type": "float", "low": 0.1, "high": 0.2}},
}
result = nb.sweep(train, config, sweep, n_trials=40, display="off")
values = result.trials["value"].tolist()
print(values[0], values[-1])
"""


@pytest.mark.long
def test_a_search_goes_on_with_the_next_fork_server(tmp_path: Path) -> None:
    with script(SWEEPS, tmp_path) as kernel:
        out, err = kernel.end(240)
    assert (kernel.process.returncode, out) == (0, "0.0 1.0\n"), err


def test_a_fork_server_serves_one_set_of_variables_that_torch_reads(
    config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads them when it is imported: a cell that sets one had no effect on later ranks."""

    def reads(config: nb.Config, ctx: nb.RunContext) -> bool:
        import torch._dynamo

        return bool(torch._dynamo.config.verbose)

    assert nb.launch(reads, config, processes=1, resume="never", display="off").value is False
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    assert nb.launch(reads, config, processes=1, resume="never", display="off").value is True


@pytest.mark.parametrize(
    ("changed", "equal"),
    [
        ({"PWD": "/y"}, True),
        ({"PYTEST_CURRENT_TEST": "test_it (call)"}, True),  # pytest sets it again for each test
        ({"HF_HOME": "/b"}, False),
        # Libraries set these for themselves, as in a kernel that imports scikit-learn or makes an
        # optimizer between two launches.
        ({"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}, True),
        ({"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me"}, True),
        ({"KMP_INIT_AT_FORK": "TRUE"}, False),
        ({"TORCHINDUCTOR_CACHE_DIR": "/mine"}, False),
    ],
)
def test_which_variables_make_another_environment(changed: dict[str, str], equal: bool) -> None:
    base = {"HF_HOME": "/a", "PWD": "/x"}
    assert (environment_key(base) == environment_key({**base, **changed})) is equal
