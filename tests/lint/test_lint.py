"""`nbtoolkit lint` finds each hazard at its line, and reports nothing in correct code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from kernels import SECONDS
from programs import write_program

from nbtoolkit.errors import NotebookError
from nbtoolkit.notebooks.lint import find_hazards
from nbtoolkit.notebooks.lint_rules import ADVICE, Hazard

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import torch
import nbtoolkit as nb

def train(config, ctx):
    model = torch.nn.Linear(2, 2)
    {}

nb.launch(train, nb.load_config())
"""


def hazards(folder: Path, *cells: str, declares: str = "n = 1") -> list[Hazard]:
    return find_hazards(write_program(folder, *cells, declares=declares))


def found(folder: Path, *cells: str) -> list[tuple[str, int, int]]:
    """Code, cell and line of each hazard; the parameters cell is cell 1."""
    return [(one.code, one.cell, one.line) for one in hazards(folder, *cells)]


def in_train(folder: Path, *lines: str) -> list[str]:
    """The codes of the hazards that these lines have in a training function."""
    one = find_hazards(write_program(folder, TRAIN.format("\n    ".join(lines)), declares="n = 1"))
    return [each.code for each in one]


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_our_own_notebooks_are_clean(path: Path) -> None:
    assert [one.sentence(path.name) for one in find_hazards(path)] == []


HAZARDS = [
    ("device-in-kernel", "import torch\n\nx = torch.zeros(2).cuda()"),
    ("device-in-kernel", "import torch\n\nx = torch.zeros(2).to('cuda')"),
    ("device-in-kernel", "import torch as t\n\nx = t.zeros(2, device='cuda:0')"),
    ("device-in-kernel", "import torch\n\nprint(torch.cuda.get_device_name(0))"),
    ("device-in-kernel", "from torch import cuda\n\nprint(cuda.mem_get_info())"),
]


@pytest.mark.parametrize(("code", "cell"), HAZARDS)
def test_a_hazard_is_named_with_its_cell_and_line(code: str, cell: str, tmp_path: Path) -> None:
    assert found(tmp_path, "first = 1", cell) == [(code, 3, 3)]


CLEAN = [
    "import torch\nx = torch.zeros(2).to(torch.float16)\nprint('cuda')",
    "import torch\ndevice = torch.device('cpu')\nx = torch.zeros(2, device=device)",
    "def shown(x):\n    return x.cuda()\nmany = list(map(lambda x: x.cuda(), []))",
    "%matplotlib inline\n!pip install -q x\nfiles = !ls\nawait files\n%cd ..\ndisplay(_)",
    "%%bash\necho $HOME",
    "import re\nre.compile('\\d')",
    "%run other.ipynb\nprint(defined_there)",
    "from math import *\nprint(pi)",
    "try:\n    import tomllib\nexcept ImportError:\n    tomllib = None\nprint(tomllib, __name__)",
    "def late():\n    return below\nbelow = 1\nlate()",
    "print([i for i in range(3)], (lambda k: k)(1))\nfor i in ():\n    pass\ndel i",
    "from pathlib import Path\nPath('/kaggle/input').glob('*')\nPath('/content').is_dir()",
    "url = 'https://home/me/data'\nroute = '/api/v1/data'\nlock = '/tmp/lock'\nshare = '/data'",
    "from sklearn.model_selection import *\nKFold(5)\ntrain_test_split([1], shuffle=False)",
    "from sklearn.model_selection import *\nwords = {}\ntrain_test_split([1], **words)",
    "import numpy as np, sklearn.model_selection as s\nnp.random.seed(0)\ns.train_test_split([1])",
    "import torch\ntorch.manual_seed(1)\ntorch.utils.data.random_split([], [])",
    "from transformers import set_seed\nimport pandas\nset_seed(1)\npandas.Series().sample(frac=1)",
    "import random\nrandom.sample([1, 2], 1)",
    "f = open('text', 'w')\nf.write('in the kernel there is one')",
    "from torch.utils.data import DataLoader\nloader = DataLoader([1])  # nothing is launched",
]


@pytest.mark.parametrize("cell", CLEAN)
def test_what_is_right_is_left_alone(cell: str, tmp_path: Path) -> None:
    if "= !ls" in TransformerManager().transform_cell(cell):
        pytest.skip("IPython 7 on Python 3.12, as on Kaggle, does not know `files = !ls` itself")
    assert hazards(tmp_path, cell) == []


WRITES = [
    "torch.save(model, 'model.pt')",
    "open('log.txt', 'a').write('x')",
    "open('log.txt', mode='wb')",
    "ctx.paths.folder.joinpath('x').open('w')",
    "__import__('pandas').DataFrame().to_csv('x.csv')",
    "import numpy as np; np.save('x', [])",
    "import mlflow; mlflow.log_metric('loss', 1.0)",
    "from pathlib import Path; Path('x').write_text('')",
    "if ctx.is_main: pass\n    else: torch.save(model, 'model.pt')",
    "if config.seed: torch.save(model, 'model.pt')",
    "if ctx.is_main or config.seed: torch.save(model, 'model.pt')",
    "if ctx.is_main: return {}\n    torch.save(model, 'model.pt')",
]


@pytest.mark.parametrize("line", WRITES)
def test_a_write_that_every_rank_makes_is_named(line: str, tmp_path: Path) -> None:
    assert in_train(tmp_path, line) == ["unguarded-write"]


ONE_WRITES = [
    "if ctx.is_main: torch.save(model, 'model.pt')",
    "if ctx.rank == 0 and config.seed: torch.save(model, 'model.pt')",
    "if not ctx.rank: torch.save(model, 'model.pt')",
    "if ctx.accelerator.is_main_process:\n        with open('x', 'w') as f: f.write('x')",
    "if not ctx.is_main: pass\n    else: torch.save(model, 'model.pt')",
    "if ctx.rank > 0: return {}\n    torch.save(model, 'model.pt')",
    "for epoch in range(3):\n        if not ctx.is_main: continue\n        torch.save(model, 'x')",
    "torch.save(model, f'part-{ctx.rank}.pt')",
    "ctx.save({'model': model.state_dict()})",
    "open('x').read(); open('x', 'rb').read(); open('a', encoding='utf-8')",
    "__import__('pandas').DataFrame().to_csv()",
    "print('x'); ctx.log({'loss': 1.0})",
]


@pytest.mark.parametrize("line", ONE_WRITES)
def test_a_write_that_one_rank_makes_is_left_alone(line: str, tmp_path: Path) -> None:
    assert in_train(tmp_path, line) == []


def test_functions_are_followed_to_where_they_run(tmp_path: Path) -> None:
    kept = "import torch\n\ndef keep(model):\n    torch.save(model, 'model.pt')"
    train = "import nbtoolkit as nb\n\ndef own(config, context):\n    {}\nnb.sweep(own, {{}}, {{}})"
    assert found(tmp_path, kept, train.format("keep(1)")) == [("unguarded-write", 2, 4)]
    guarded = train.format("if context.is_main:\n        keep(1)")
    assert found(tmp_path, kept, guarded) == []
    as_argument = train.format("nb.fit(context, config, 1, 2, 3, loss=4, step=keep)")
    assert found(tmp_path, kept, as_argument) == [("unguarded-write", 2, 4)]
    assert found(tmp_path, kept, "keep(1)") == []
    decorated = kept.replace("def keep", "@accelerator.on_main_process\ndef keep")
    assert found(tmp_path, f"accelerator = 1\n{decorated}", as_argument) == []

    placed = "def place(model):\n    return model.cuda()"
    assert found(tmp_path, placed, "place(1)") == [("device-in-kernel", 2, 2)]
    assert found(tmp_path, placed, train.format("place(1)")) == [("fixed-device", 2, 2)]


def test_a_method_is_not_taken_for_the_function_of_its_name(tmp_path: Path) -> None:
    method = "class Model:\n    def train(self, ctx):\n        open('x', 'w')"
    assert found(tmp_path, TRAIN.format("return {}"), method) == []
    assert found(tmp_path, TRAIN.format("open('x', 'w')"), method) == [("unguarded-write", 2, 7)]


def test_a_device_fixed_in_the_training_function_is_named(tmp_path: Path) -> None:
    for line in ("model.cuda()", "model.to('cuda:0')", "model.to(torch.device('cuda'))"):
        assert in_train(tmp_path, line) == ["fixed-device"]
    assert in_train(tmp_path, "model.to(ctx.device); torch.cuda.synchronize()") == []


def test_a_device_chosen_in_a_variable_is_followed(tmp_path: Path) -> None:
    chosen = "import torch\ndevice = 'cuda' if n else 'cpu'\nx = torch.zeros(2).to(device)"
    assert found(tmp_path, chosen) == [("device-in-kernel", 2, 3)]


def test_what_is_built_before_a_launch_is_named(tmp_path: Path) -> None:
    built = "from torch.utils.data import DataLoader as Loader\nloader = Loader([1, 2])"
    launch = (
        "from accelerate import notebook_launcher\ndef work():\n    pass\nnotebook_launcher(work)"
    )
    assert found(tmp_path, built, launch) == [("built-before-launch", 2, 2)]
    assert found(tmp_path, launch, built) == []
    accelerator = "import accelerate\naccelerator = accelerate.Accelerator()"
    assert found(tmp_path, accelerator, launch) == [("built-before-launch", 2, 2)]
    assert in_train(tmp_path, "loader = torch.utils.data.DataLoader([1])") == []


def test_lines_are_those_that_people_see(tmp_path: Path) -> None:
    blank = "\n\n!echo one \\\n  two\n%time x = torch.cuda.init()\ntorch.cuda.init()"
    timed = "%%time\ntorch.cuda.init()"
    assert found(tmp_path, blank, timed) == [
        ("device-in-kernel", 2, 5),
        ("device-in-kernel", 2, 6),
        ("device-in-kernel", 3, 2),
    ]


def test_a_cell_that_is_not_python_does_not_hide_the_others(tmp_path: Path) -> None:
    assert found(tmp_path, "pip install six(", "torch.cuda.init()") == [("device-in-kernel", 3, 1)]


def test_what_is_meant_can_be_allowed(tmp_path: Path) -> None:
    beside = "import torch\ntorch.cuda.init()  # nb: ignore[device-in-kernel]"
    above = "import torch\n# nb: ignore[fixed-device, device-in-kernel]\ntorch.cuda.init()"
    assert found(tmp_path, beside) == found(tmp_path, above) == []
    other = beside.replace("device-in-kernel", "fixed-device")
    assert found(tmp_path, other) == [("device-in-kernel", 2, 2)]


def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(NotebookError, match="not a notebook"):
        find_hazards(tmp_path / "a.ipynb")


def test_the_page_tells_of_every_hazard() -> None:
    page = (ROOT / "docs/lint.md").read_text()
    assert [code for code in ADVICE if f"| `{code}` |" not in page] == []


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "nbtoolkit", "lint", *words]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=SECONDS)


def test_the_command_tells_and_ends_with_1_only_where_there_are_hazards(tmp_path: Path) -> None:
    write_program(tmp_path, "x = 1", declares="n = 1", name="good")
    write_program(tmp_path, "torch.cuda.init()", declares="n = 1", name="bad")
    good = command(tmp_path, "good.ipynb")
    assert (good.returncode, good.stdout) == (0, "no hazards in 1 notebook\n")

    bad = command(tmp_path, "good.ipynb", "bad.ipynb")
    assert bad.returncode == 1
    assert bad.stdout == (
        "bad.ipynb, cell 2, line 1: device-in-kernel: torch.cuda.init() makes the kernel hold a "
        "GPU\n  Do now:  move it into the function that is launched, with ctx.device; "
        "nb.detect_hardware() lists the devices without using them\n1 hazard in 2 notebooks\n"
    )
    [row] = json.loads(command(tmp_path, "good.ipynb", "bad.ipynb", "--json").stdout)
    assert (row["notebook"], row["code"], row["cell"]) == ("bad.ipynb", "device-in-kernel", 2)

    missing = command(tmp_path, "none.ipynb")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "none.ipynb cannot be read: No such file" in missing.stderr


@pytest.mark.parametrize(
    "lines",
    [
        ["if ctx.is_main:", "    nb.predict(ctx, model, [])"],
        ["if ctx.is_main:", "    ctx.report({})"],
        ["if ctx.rank != 0:", "    return", "ctx.save({})"],
        ["if ctx.is_main:", "    ctx.accelerator.gather_for_metrics(1)"],
        ["import torch.distributed as dist", "if ctx.rank == 0:", "    dist.barrier()"],
        ["model, x = ctx.prepare(model, [])", "if ctx.is_main:", "    y = model(x)"],
        [
            "from torch.nn.parallel import DistributedDataParallel as DDP",
            "m = torch.nn.parallel.DistributedDataParallel(model)",
            "if ctx.is_main:",
            "    m(1)",
        ],
    ],
)
def test_what_the_main_rank_does_alone_and_others_must_do_too(
    lines: list[str], tmp_path: Path
) -> None:
    assert in_train(tmp_path, *lines) == ["lone-collective"]


def test_what_the_main_rank_may_do_alone_is_left_alone(tmp_path: Path) -> None:
    lines = ["model = ctx.prepare(model)", "ctx.report({})", "model(1)", "if ctx.is_main:"]
    lines += ["    ctx.log({})", "    ctx.unwrap(model)(1)", "    ctx.print(1)", "    len([])"]
    assert in_train(tmp_path, *lines) == []
