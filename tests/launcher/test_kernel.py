"""nb.launch in a real Jupyter kernel: cells, output, interrupt, restart, fork."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import (
    Cell,
    Notebook,
    all_gone,
    descendants,
    notebook,
    ranks_up,
    shared_notebook,
    until,
)
from records import owned_runs

import nbtoolkit as nb

SET_UP = """
config = nb.load_config("config.json", env=None)
def run(train, processes=2, **options):
    return nb.launch(train, config, processes=processes, resume="never", **options)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(folder / "out")}
    config = nb.load_config(env=None, overrides=settings)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.fixture(scope="module")
def shared(session_leaves_nothing: None, home: Path) -> Iterator[Notebook]:
    """One kernel, with one fork server, for the tests that leave it as it was."""
    with shared_notebook(home) as running:
        running.run(SET_UP).ok()
        yield running


def new_run(home: Path, before: set[Path]) -> Path:
    """The folder of the run that was started since."""

    def look() -> list[Path]:
        return [folder for folder in owned_runs(home / "out") if folder not in before]

    return Path(until(look, "the run's supervisor")[0])


def runs(home: Path) -> set[Path]:
    return set((home / "out").glob("*")) if (home / "out").exists() else set()


CELL = """
from dataclasses import dataclass
import numpy as np

SCALE = 10
weights = np.arange(10_000.0)

@dataclass
class Point:
    x: float

class Model:
    def __init__(self): self.points = [Point(1.0)]
    def forward(self, x): return Point(x * SCALE + self.points[0].x)

class Child(Model):
    def forward(self, x): return super().forward(x)

def helper(x): return Child().forward(x)
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def evens(n):
    for i in range(n): yield 2 * i
square = lambda x: x * x

def make(start):
    def train(config, ctx):
        return helper(float(weights[ctx.rank + start])), factorial(square(2)), list(evens(3))
    return train

train = make(1)
"""


def test_functions_classes_and_globals_of_cells(shared: Notebook) -> None:
    """Helpers, subclasses, recursion, a generator, a lambda and a closure."""
    shared.run(CELL).ok()
    cell = shared.run("r = run(train, display='off'); print(r.values)").ok()
    rest = "24, [0, 2, 4]"
    # A busy machine prints before that it waits for the fork server.
    assert cell.text.endswith(f"[(Point(x=11.0), {rest}), (Point(x=21.0), {rest})]\n")
    # the cell's own class, not a copy of it
    assert shared.run("print(type(r.value[0]) is Point)").ok().text == "True\n"
    shared.run("SCALE = 100").ok()  # a cell that was run again takes effect
    cell = shared.run("print(run(train, display='off').value[0])").ok()
    assert cell.text.endswith("Point(x=101.0)\n")


def test_output_appears_in_the_cell(shared: Notebook) -> None:
    cell = shared.run("""
    def talk(config, ctx):
        from tqdm.auto import tqdm
        for n in range(3):
            print("line", n, "of rank", ctx.rank)
        for n in tqdm(range(3), desc="bar"):
            pass
        display({"a": 1})
    r = run(talk, display="text")
    r
    """).ok()
    lines = cell.text.splitlines()
    assert "plan: 2 processes" in lines[0]
    assert [line for line in lines if "line" in line] == [
        f"[rank 0] line {n} of rank 0" for n in range(3)
    ]
    assert "bar: 100%" in cell.text
    assert "[rank 0] {'a': 1}" in lines
    assert "<table" in cell.displayed[-1]["text/html"]
    assert "completed" in cell.displayed[-1]["text/html"]


def test_the_users_own_exception_names_the_cells_line(shared: Notebook) -> None:
    shared.run("""
    class MyError(Exception):
        def __init__(self, code, *, hint): super().__init__(f"code {code}"); self.hint = hint
    def fails(config, ctx):
        if ctx.rank == 1:
            raise MyError(3, hint="try again")
    """).ok()
    cell = shared.run("""
    try:
        run(fails, display="off")
    except MyError as error:
        caught = error
    print(caught.hint, caught.__notes__[0])
    """).ok()
    number = shared.run("print(In.index([c for c in In if 'def fails' in c][0]))").ok().text.strip()
    assert f"try again [nbtoolkit] rank 1, Cell In[{number}], line 5; log: " in cell.text
    cell = shared.run("run(fails, display='off')")
    assert cell.error == "MyError"
    assert 'raise MyError(3, hint="try again")' in plain(cell.traceback)
    # IPython 7 leaves notes out of its traceback: they are above it
    assert f"rank 1, Cell In[{number}], line 5" in cell.text + plain(cell.traceback)
    assert "nbtoolkit/launcher/" not in plain(cell.traceback)  # our own frames are left out


MODULE = """
def fails_in_a_file(values):
    # comment

    total = 0
    for value in values:
        total += (
            1
            / value
        )
    return total
"""

FAILS = """
import torch
import fails_in_module

def fails_in_a_cell(config, ctx):
    first = 1

    second = 2
    return fails_in_module.fails_in_a_file([first, 0, second])

in_a_lambda = lambda config, ctx: (
    1,
    {}["missing"],
)
"""


def beside_arrows(cell: Cell) -> list[str]:
    """The source beside the arrows of a traceback."""
    lines = plain(cell.traceback).splitlines()
    return [line.split(maxsplit=2)[2] for line in lines if re.match(r"-+> \d", line)]


def test_the_arrow_stands_beside_the_line_that_failed(shared: Notebook, home: Path) -> None:
    (home / "fails_in_module.py").write_text(MODULE)
    shared.run(FAILS).ok()
    cell = shared.run("nb.launch(fails_in_a_cell, config, processes=1, resume='never')")
    assert cell.error == "ZeroDivisionError"
    inner = ["return fails_in_module.fails_in_a_file([first, 0, second])", "1"]
    assert beside_arrows(cell)[1:] == inner

    cell = shared.run("nb.launch(in_a_lambda, config, processes=1, resume='never')")
    assert beside_arrows(cell)[1:] == ['{}["missing"],']


def test_the_traceback_of_a_rank_stands_in_its_log(shared: Notebook) -> None:
    shared.run("""
    def fails_after_a_bar(config, ctx):
        from tqdm.auto import tqdm
        bar = tqdm(range(9), desc="bar")
        next(iter(bar))
        raise ValueError("in the log")
    """).ok()
    cell = shared.run("run(fails_after_a_bar, display='text')")
    assert cell.error == "ValueError"
    assert "Traceback" not in cell.text
    assert "bar:   0%" in cell.text
    cell = shared.run("""
    from pathlib import Path
    [folder] = Path(config.runtime.output_dir).glob("*-fails_after_a_bar-*")
    print(nb.attach(folder).logs(0))
    """).ok()
    assert 'raise ValueError("in the log")' in cell.text


def test_an_error_of_ours_in_the_kernel_ends_at_the_users_line(shared: Notebook) -> None:
    """For functions and methods; causes and all frames are kept, for the debugger."""
    shared.run("open('bad.yaml', 'w').write('train: {epochs: 1\\nmodel: 3\\n')").ok()
    cell = shared.run("""
    def mine():
        return nb.load_config("bad.yaml")

    mine()
    """)
    assert cell.error == "ConfigError"
    assert beside_arrows(cell)[-2:] == ["mine()", 'return nb.load_config("bad.yaml")']
    assert "nbtoolkit/" not in plain(cell.traceback)
    assert "ParserError" in plain(cell.traceback)
    cell = shared.run("""
    import sys, traceback
    print(traceback.extract_tb(sys.last_traceback)[-1].filename)
    """).ok()
    assert "nbtoolkit/config/loading.py" in cell.text
    for call in ("nb.Folds.load('bad.yaml')", "nb.make_folds([1, 2], k=7)"):
        assert "nbtoolkit/" not in plain(shared.run(call).traceback)


def test_an_inline_run_and_a_handle_show_the_users_frames_alone(shared: Notebook) -> None:
    shared.run("""
    def fails_alone(config, ctx):
        raise ValueError("mine")
    """).ok()
    for call in ("run(fails_alone, 1, start='inline')", "run(fails_alone, 1, wait=False).result()"):
        cell = shared.run(call)
        assert cell.error == "ValueError"
        first, *_, last = beside_arrows(cell)
        assert (first, last) == (call, 'raise ValueError("mine")')
        assert "nbtoolkit/" not in plain(cell.traceback)
        assert "hidden" not in plain(cell.traceback)


def test_an_error_about_the_ranks_calls_names_the_cells(shared: Notebook) -> None:
    shared.run("""
    def reports_alone(config, ctx):
        if ctx.is_main:
            ctx.report({"x": 1.0}, step=0)
        return ctx.rank
    """).ok()
    number = shared.run("print(len(In) - 2)").ok().text.strip()
    cell = shared.run("run(reports_alone, display='text')")
    assert cell.error == "ReportError"
    assert f"ReportError: ctx.report at Cell In[{number}], line 3 was called" in cell.text
    shown = plain(cell.traceback)
    # In IPython before 8, the traceback itself has the files of cells; our sentence has not.
    [said] = [line for line in shown.splitlines() if "was called on rank 0 only" in line]
    assert f"report at Cell In[{number}], line 3 was called on rank 0 only" in said
    assert "ipykernel" not in said


def test_what_a_rank_draws_turns_to_text(shared: Notebook) -> None:
    cell = shared.run("""
    from tqdm.auto import tqdm
    def draws(config, ctx):
        for n in tqdm(range(3), desc="bar"):
            pass
        display({"a": 1})
        print("said")
    r = run(draws)
    """).ok()
    log = cell.updated[-1]["text/html"]  # the view shows what rank 0 has written
    assert "bar: 100%" in log
    assert "{&#x27;a&#x27;: 1}" in log
    assert "said" in log
    [view] = cell.displayed  # ours, and nothing of the ranks
    assert "draws" in view["text/html"]


def test_stale_variables_of_another_job_mislead_nobody(shared: Notebook) -> None:
    cell = shared.run("""
    import os
    stale = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.9.9.9",
             "MASTER_PORT": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1",
             "TORCHELASTIC_RUN_ID": "old", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.update(stale)
    def place(config, ctx):
        left = [k for k in os.environ if k.startswith("SLURM_")]
        return ctx.rank, ctx.world_size, os.environ["RANK"], os.environ["WORLD_SIZE"], left
    try:
        print(run(place, display="off").values)
        print({name: os.environ.get(name) for name in stale} == stale)
    finally:
        for name in stale: del os.environ[name]
    """).ok()
    told = ["[(0, 2, '0', '2', []), (1, 2, '1', '2', [])]", "True"]
    assert cell.text.splitlines()[-2:] == told


@pytest.mark.parametrize(
    ("train", "times"),
    [("reports_until_stopped", 1), pytest.param("sleeps", 2, marks=pytest.mark.long)],
)
def test_interrupt_button(train: str, times: int, shared: Notebook, home: Path) -> None:
    before = runs(home)
    message = shared.start(f"run(functions.{train})")
    folder = new_run(home, before)
    ranks = ranks_up(folder)
    told = nb.attach(folder)
    for _ in range(times):
        shared.interrupt()
        until(lambda: [e for e in told.events() if e.type == "stop"], "the interrupt")
    cell = shared.wait(message)
    assert cell.error == "KeyboardInterrupt"
    assert "stopping: interrupted" in cell.text
    all_gone(ranks)
    # A busy machine prints that it waits for the fork server.
    shown = shared.run("print(run(functions.ranks, display='off').status)").ok().text
    assert shown.endswith("completed\n")


def test_restart_leaves_nothing(home: Path) -> None:
    with notebook(home) as kernel:
        kernel.run(SET_UP).ok()
        before = runs(home)
        kernel.run("handle = run(functions.sleeps_with_helpers, wait=False)").ok()
        ranks_up(new_run(home, before))
        family = descendants(kernel.pid)
        assert len(family) >= 9
        kernel.restart()
        all_gone(family)
        kernel.run(SET_UP).ok()
        # A busy machine prints that it waits for the fork server.
        shown = kernel.run("print(run(functions.ranks, display='off').status)").ok().text
        assert shown.endswith("completed\n")


@pytest.mark.long
def test_killed_kernel_and_a_new_one_attaches(home: Path) -> None:
    before = runs(home)
    with notebook(home) as kernel:
        kernel.run(SET_UP).ok()
        kernel.run(f"config = config.with_overrides({{'model.go': {str(home / 'go')!r}}})").ok()
        kernel.start("run(functions.waits_for_file, detach=True)")
        folder = new_run(home, before)
        ranks_up(folder)
        family = descendants(kernel.pid)
        kernel.kill()
    with notebook(home) as another:
        (home / "go").write_text("still here")
        cell = another.run(f"print(nb.attach({str(folder)!r}).result().value)").ok()
        assert cell.text.splitlines()[-1] == "still here"
    all_gone(family)


def plain(text: str) -> str:
    """A traceback without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
