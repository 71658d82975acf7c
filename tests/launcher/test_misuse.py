"""Calls and training functions that are nearly right get an early and clear error."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import functions
import numpy as np
import pytest
import torch
from kernels import SECONDS, run_folder, script
from launches import inline
from whole import needs_extras

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, ConfigError, LaunchError, ResumeError, RunFolderError
from nbtoolkit.run.identity import Identity


def quiet(train: Any, config: Any, **options: Any) -> nb.RunResult:
    """Launch as many processes as the configuration says."""
    return nb.launch(train, config, **{"display": "off", "resume": "never", **options})


# --- calls ---


async def waits(config: Any, ctx: Any) -> int:
    return 1


def yields(config: Any, ctx: Any) -> Any:
    yield 1


def takes_none() -> int:
    return 1


def takes_more(config: Any, ctx: Any, lr: float) -> float:
    return lr


class Yields:
    def __call__(self, config: Any, ctx: Any) -> Any:
        yield 1


@pytest.mark.parametrize(
    ("train", "what"),
    [
        (waits, r"waits is an async function.*\n.*\n.*asyncio.run"),
        (functools.partial(waits), "waits is an async function"),
        (yields, "yields is a generator function"),
        (Yields(), "Yields is a generator function"),
        (takes_none, r"takes_none\(config, ctx\): too many positional arguments"),
        (takes_more, r"missing a required argument: 'lr'\n(.*\n)*.*functools.partial"),
        (Yields, "too many positional arguments"),
        ("train", "'train', which is not a function"),
        (42, "pass the function itself"),
    ],
)
def test_a_function_that_cannot_be_meant(train: Any, what: str, config: nb.Config) -> None:
    with pytest.raises(LaunchError, match=what):
        quiet(train, config)
    assert not Path(config.runtime.output_dir).exists()


def test_partials_and_built_in_functions_can_be_launched(config: nb.Config) -> None:
    assert quiet(functools.partial(takes_more, lr=0.5), config).value == 0.5
    settings = {"tracking.mlflow": False, "runtime.output_dir": config.runtime.output_dir}
    assert inline(print, {"seed": 1, **settings}).status == "completed"


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"processes": 0}, "a whole number of at least 1"),
        ({"processes": "2"}, "a whole number of at least 1"),
        ({"processes": True}, "a whole number of at least 1"),
        ({"name": 5}, "a string"),
        ({"resume": None}, '"auto" \\| "never" \\| a run\'s id or folder'),
        ({"resume": ""}, '"auto" \\| "never"'),
        ({"display": "rich"}, "'auto' \\| 'html' \\| 'text' \\| 'off'"),
        ({"on_event": 3}, "a function of one event"),
        ({"start": "spawn"}, r"'forkserver' \| 'inline'"),
    ],
)
def test_an_argument_that_launch_does_not_take(
    wrong: dict[str, Any], allowed: str, config: nb.Config
) -> None:
    (name,) = wrong
    with pytest.raises(LaunchError, match=rf"(?s)^{name}=.* is not valid.*Allowed: {allowed}"):
        quiet(functions.ranks, config, **wrong)


@pytest.mark.parametrize(
    ("call", "name", "message"),
    [
        (nb.launch, "proceses", "Allowed: train, config, processes, start, wait, where, name, "),
        (nb.launch, "proceses", "Do now:  pass processes$"),
        (nb.launch, "batch_size", r"set a setting in the config; .* functools.partial\(train, "),
        (nb.sweep, "start", "Allowed: train, config, space, n_trials, .*, display, on_event\n"),
        (nb.cross_validate, "n_trials", "Allowed: train, config, folds, processes, wait, where, "),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_those_that_do(
    call: Any, name: str, message: str
) -> None:
    with pytest.raises(LaunchError, match=rf"has no argument '{name}'\n(.*\n)*.*{message}"):
        call(functions.ranks, None, **{name: 2})


@needs_extras
@pytest.mark.parametrize("name", ["num_processes", "nprocs", "num_gpus"])
def test_another_launchers_name_for_processes_is_refused_with_ours(name: str) -> None:
    calls: list[Any] = [nb.launch, nb.cross_validate, nb.find_batch_size, nb.find_learning_rate]
    calls += [nb.compare, nb.verify.parity, nb.verify.resume]
    for call in calls:
        with pytest.raises(LaunchError, match=rf"has no argument '{name}'\n(.*\n)*.*processes=2"):
            call(functions.ranks, None, **{name: 2})
    for call in (nb.sweep, nb.calibrate):
        with pytest.raises(LaunchError, match=rf"'{name}'\n(.*\n)*.*distributed.world_size\": 2"):
            call(functions.ranks, None, **{name: 2})


def test_an_inline_launch_cannot_be_detached(config: nb.Config) -> None:
    with pytest.raises(LaunchError, match="cannot be detached"):
        quiet(functions.ranks, config, start="inline", detach=True)


@pytest.mark.parametrize("run", ["nonsense", None, 3])
def test_attach_says_what_names_a_run(run: Any) -> None:
    message = "there is no run nonsense" if run == "nonsense" else f"{run} is not a run"
    with pytest.raises(LaunchError, match=rf"(?s){message}.*Allowed: .*Do now: "):
        nb.attach(run)


@pytest.mark.parametrize("given", [5, ["optim.lr=3"]])
def test_a_configuration_of_another_kind(given: Any) -> None:
    message = r"(?s)is not a configuration.*a dict of settings.*Do now"
    with pytest.raises(ConfigError, match=message):
        nb.launch(functions.ranks, given)


# --- what a rank hands over ---


TOLD = {
    # A call in the function, and its error.
    "a name logged": (lambda ctx: ctx.log("loss"), TypeError, r"not a dict\n  Allowed: a dict"),
    "a number reported": (lambda ctx: ctx.report(0.5), TypeError, r"not a dict\n  Allowed: a dict"),
    "only a step": (lambda ctx: ctx.report(step=3), TypeError, "not a dict"),
    "a text as metric": (
        lambda ctx: ctx.log({"loss": "low"}),
        TypeError,
        r"the metric 'loss' is 'low' \(a str\), not a number",
    ),
    "a text as step": (lambda ctx: ctx.log({"loss": 1.0}, step="e1"), TypeError, "step is 'e1'"),
    "a misspelt step": (
        lambda ctx: ctx.log({"loss": 1.0}, setp=3),
        TypeError,
        r"as a dict and as keywords \(setp\)",
    ),
    **{
        f"a checkpoint {kind!r}": (
            lambda ctx, kind=kind: ctx.save({}, kind=kind),
            CheckpointError,
            "cannot name a checkpoint",
        )
        for kind in ("../../x", "a/b", "", ".hidden")
    },
    "a module saved": (
        lambda ctx: ctx.save(torch.nn.Linear(1, 1)),
        CheckpointError,
        r"save a Linear as a checkpoint: it is not a dict\n(.*\n)*.*state_dict",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), TOLD.values(), ids=TOLD)
def test_what_the_context_cannot_take_is_told(
    call: Any, kind: type[Exception], message: str, config: nb.Config
) -> None:
    with pytest.raises(kind, match=message):
        inline(lambda config, ctx: call(ctx), config)


def test_a_step_is_a_whole_number(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> None:
        for step in (1, np.int64(2), torch.tensor(3), None):
            ctx.log({"loss": 1.0}, step=step)

    result = quiet(train, config)
    events = [json.loads(line) for line in result.paths.events.read_text().splitlines()]
    assert [e["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, None]


def test_metrics_are_a_dict_or_keywords_with_the_step_or_the_epoch(config: nb.Config) -> None:
    def train(config: Any, ctx: Any) -> None:
        for call in (ctx.report, ctx.log):
            call(val_accuracy=0.9, epoch=3)
            call(val_accuracy=0.9, step=4)
            call(val_accuracy=0.9, epoch=3, step=5)
            call({"val_accuracy": 0.9}, epoch=6)
            call({"val_accuracy": 0.9, "epoch": 3}, 7)

    result = quiet(train, config, processes=2)
    events = [json.loads(line) for line in result.paths.events.read_text().splitlines()]
    for kind in ("report", "metrics"):
        told = [(e["values"], e["step"]) for e in events if e["type"] == kind]
        assert [step for _, step in told] == [3, 4, 5, 6, 7]
        assert [values.get("epoch") for values, _ in told] == [None, None, 3.0, None, 3.0]
        assert all(values["val_accuracy"] == 0.9 for values, _ in told)


# --- what a training function does ---


def recurses(config: Any, ctx: Any) -> int:
    return recurses(config, ctx) + 1


def test_endless_recursion_comes_back_as_itself(config: nb.Config) -> None:
    with pytest.raises(RecursionError, match="maximum recursion depth") as caught:
        quiet(recurses, config)
    assert len(caught.traceback) < 150


@pytest.mark.long
def test_cell_functions_and_classes_in_pools_and_loaders(config: nb.Config, tmp_path: Path) -> None:
    """Plain pickle takes them by name; a DataLoader whose worker cannot do so waits for ever."""
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    code = f"""
    import multiprocessing, pickle
    from collections import namedtuple
    from torch.utils.data import DataLoader

    config = nb.load_config("{tmp_path}/config.json", env=None)
    Item = namedtuple("Item", "x y")

    class Data:
        def __len__(self): return 4
        def __getitem__(self, index): return Item(float(index), index)

    def square(x): return x * x

    def train(config, ctx):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            squares = pool.map(square, [1, 2])
        loader = DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="fork")
        sums = [batch.x.sum().item() for batch in loader]
        return squares, sums, pickle.loads(pickle.dumps(Item(1, 2)))

    result = nb.launch(train, config, display="off")
    print(result.value, type(result.value[2]) is Item)
    print(b"cloudpickle" in result.paths.value(0).read_bytes())
    """
    with script(code, tmp_path) as kernel:
        assert kernel.output().splitlines() == [
            "([1, 4], [6.0], Item(x=1, y=2)) True",
            "True",  # by value: readable where the class is not defined
        ]


def test_weights_of_a_run_that_saved_none(config: nb.Config) -> None:
    result = inline(functions.draws, config)
    with pytest.raises(CheckpointError, match=r"saved no checkpoint\n(.*\n)*.*ctx\.save"):
        result.load_into(torch.nn.Linear(1, 1))


def test_the_value_of_rank_0_is_read_without_the_others(config: nb.Config) -> None:
    result = quiet(functions.ranks, config, processes=2)
    result.paths.value(1).write_bytes(b"nothing that can be read")
    assert result.value["rank"] == 0


# --- runs that were there before ---


class Trains:
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def __call__(self, config: Any, ctx: Any) -> float:
        return self.lr

    def train(self, config: Any, ctx: Any) -> float:
        return self.lr


BOUND = [
    lambda lr: lambda config, ctx: lr,
    lambda lr: lambda config, ctx, rate=lr: rate,
    Trains,
    lambda lr: Trains(lr).train,
    lambda lr: functools.partial(takes_more, lr=lr),
]


@pytest.mark.parametrize("make", BOUND, ids=["closure", "default", "object", "method", "partial"])
def test_functions_that_differ_in_a_bound_value_share_no_run(make: Any) -> None:
    assert Identity.of({}, make(0.1)) == Identity.of({}, make(0.1))
    assert Identity.of({}, make(0.1)) != Identity.of({}, make(0.2))


def test_a_run_damaged_by_a_crash_hinders_no_launch(config: nb.Config) -> None:
    """What is not synced to the disk is empty after a crash of the machine."""
    damaged = quiet(functions.draws, config).paths
    damaged.events.write_text("")
    assert quiet(functions.draws, config, resume="auto").status == "completed"
    with pytest.raises(ResumeError, match=r"its record .*events\.jsonl is damaged"):
        quiet(functions.draws, config, resume=damaged.run_id)


def test_a_detached_run_does_not_keep_its_kernel(config: nb.Config, tmp_path: Path) -> None:
    go = tmp_path / "go"
    mine = config.with_overrides({"model.go": str(go)})
    (tmp_path / "config.json").write_text(json.dumps(mine.to_dict()))
    code = f"""
    config = nb.load_config("{tmp_path}/config.json", env=None)
    nb.launch(functions.waits_for_file, config, detach=True, wait=False, display="off")
    """
    with script(code, tmp_path) as kernel:
        kernel.output()  # it has ended before the run, which waits
    handle = nb.attach(run_folder(tmp_path / "out"))
    assert not handle.done()
    go.write_text("gone on")
    assert handle.result(timeout=SECONDS).value == "gone on"


def test_a_forkserver_that_cannot_start_says_why(config: nb.Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    code = f"""
    import os
    config = nb.load_config("{tmp_path}/config.json", env=None)
    os.environ["PYTHONHOME"] = "/nowhere"
    try:
        nb.launch(functions.ranks, config, display="off")
    except nb.errors.LaunchError as error:
        print(error)
    """
    with script(code, tmp_path) as kernel:
        said = kernel.output()
    assert "the fork server process ended with code 1; its last output:" in said
    assert "No module named 'encodings'" in said
    assert "Do now:  launch again" in said
    assert not list((tmp_path / "out").iterdir())


# --- surroundings ---


@pytest.mark.parametrize(
    "value", ["auto", *(pytest.param(value, marks=pytest.mark.long) for value in ("", "0"))]
)
def test_omp_num_threads_that_is_no_number(
    value: str, config: nb.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    result = quiet(lambda config, ctx: torch.get_num_threads(), config, processes=2)
    assert result.values == [result.plan.threads_per_rank] * 2


def test_a_working_directory_that_was_deleted(
    config: nb.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    deleted = r"directory of this process has been deleted\n(.*\n)*.*%cd"
    with pytest.raises(LaunchError, match=deleted):
        quiet(functions.ranks, config)


@pytest.mark.parametrize(
    ("name", "what"),
    [("x" * 300, "File name too long"), ("file", r"file cannot be written.*\n.*disk with free")],
)
def test_an_output_folder_that_cannot_be(
    config: nb.Config, tmp_path: Path, name: str, what: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    mine = config.with_overrides({"runtime.output_dir": str(tmp_path / name)})
    with pytest.raises(RunFolderError, match=what):
        quiet(functions.ranks, mine, resume="auto")
