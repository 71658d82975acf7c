"""The trainers of docs/recipes.md run unchanged: on one process, on two, stopped, resumed."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

# How to validate the page's `model`, loaded from a checkpoint of the run on one process.
VALIDATE = {
    "Hugging Face Trainer": """
rows = sentences(64, seed=1)
loaded = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
""",
    "Lightning Trainer": """
loaded = model.training_step(points(64, seed=1).tensors, 0)
""",
}

# Two recipes of six launches each, whose libraries alone take seconds to import.
pytestmark = pytest.mark.timeout(900)

# What follows the page's own code: its `result` is of one process and tracked, these are not.
TAIL = """
import json, time

def told(result):
    events = list(nb.attach(result.paths.folder).events())
    return {
        "status": result.status,
        "processes": result.plan.processes,
        "folder": str(result.paths.folder),
        "values": result.values,
        "reports": [{"step": e.step, **e.values}
                    for e in events if e.type == "report" and e.step is not None],
        "logged": [e.values for e in events if e.type == "metrics"],
        "log_of_rank_1": result.paths.log(1).read_text() if result.plan.processes > 1 else "",
    }

quick = config.with_overrides({"tracking.mlflow": False})
two = nb.launch(train, quick, processes=2, display="off")
was = told(two)
longer = quick.with_overrides({"train.epochs": 3})
resumed = nb.launch(train, longer, processes=2, resume=two.paths.folder, display="off")
handle = nb.launch(
    train, quick.with_overrides({"train.epochs": 500}), processes=2, wait=False, display="off"
)
while not handle.done() and not any(event.type == "report" for event in handle.events()):
    time.sleep(0.02)
handle.stop()
stopped = handle.result()
print(json.dumps({
    "one": told(result), "two": was, "resumed": told(resumed), "stopped": told(stopped),
    "loaded": float(loaded),
}))
"""


def code_of(section: str) -> str:
    """The Python of one section of the page."""
    text = re.split(r"(?m)^## ", PAGE.read_text())
    [body] = [part for part in text if part.startswith(section)]
    return "\n".join(re.findall(r"(?ms)^```python\n(.*?)^```", body))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long) for name in VALIDATE],
)
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recipe")
    script = folder / "recipe.py"
    script.write_text(code_of(request.param) + VALIDATE[request.param] + TAIL)
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**answer, "name": request.param, "database": folder / "outputs" / "mlflow.db"}


def loss(values: dict[str, float]) -> float:
    return values["val_loss"] if "val_loss" in values else values["eval_loss"]


@pytest.mark.parametrize(("name", "processes"), [("one", 1), ("two", 2)])
def test_recipe_trains_on_every_rank(told: dict[str, Any], name: str, processes: int) -> None:
    run = told[name]
    assert (run["status"], run["processes"]) == ("completed", processes)
    assert [report["step"] for report in run["reports"]] == [8, 16]  # 256 samples, 32 a step
    assert loss(run["reports"][1]) < 0.97 * loss(run["reports"][0])
    assert [loss(value) for value in run["values"]] == [loss(run["reports"][1])] * processes
    assert len(run["logged"]) == 3  # every fifth step
    assert all("loss" in values for values in run["logged"])


@pytest.mark.long
@pytest.mark.parametrize("told", ["Hugging Face Trainer"], indirect=True)
def test_two_ranks_take_the_steps_of_one(told: dict[str, Any]) -> None:
    """Lightning's sampler deals another order to two ranks."""
    for one, two in zip(told["one"]["reports"], told["two"]["reports"], strict=True):
        assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-3)


def test_a_stop_ends_both_ranks(told: dict[str, Any]) -> None:
    run = told["stopped"]
    assert (run["status"], run["values"]) == ("stopped", [])
    assert 1 <= len(run["reports"]) < 500
    assert "Traceback" not in run["log_of_rank_1"]


def test_a_resumed_run_goes_on_where_it_was(told: dict[str, Any]) -> None:
    run = told["resumed"]
    assert run["folder"] == told["two"]["folder"]
    assert [report["step"] for report in run["reports"]] == [8, 16, 24]
    assert loss(run["reports"][2]) < loss(run["reports"][1])


def test_the_model_comes_back_from_the_checkpoint(told: dict[str, Any]) -> None:
    assert told["loaded"] == pytest.approx(loss(told["one"]["reports"][1]), rel=1e-3)


def test_metrics_are_in_mlflow_once(told: dict[str, Any]) -> None:
    with sqlite3.connect(told["database"]) as database:
        [[runs]] = database.execute("select count(*) from runs").fetchall()
        points = database.execute("select key, step from metrics where key like '%loss'").fetchall()
    name = "val_loss" if told["name"].startswith("Lightning") else "eval_loss"
    assert runs == 1
    assert sorted(step for key, step in points if key == name) == [8, 16]
    assert sorted(step for key, step in points if key == "loss") == [5, 10, 15]


MANUAL = """
class Line(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.layer, self.unused, self.lr = torch.nn.Linear(8, 1), torch.nn.Linear(1, 1), lr
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("train_mse", loss, on_epoch=True, on_step=False)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


settings = {"train": {"epochs": 2, "batch_size": 32}, "tracking.mlflow": False}
settings |= {"optim.lr": 0.01, "distributed.find_unused_parameters": True}
result = nb.launch(train, settings, processes=2, display="off")
reports = [e for e in nb.attach(result.paths.folder).events() if e.type == "report"]
assert [e.step for e in reports][:2] == [8, 16], reports
assert reports[1].values["train_mse"] < reports[0].values["train_mse"]
assert (result.paths.checkpoints / "lightning.ckpt").is_file()
"""


@pytest.mark.long
def test_lightning_with_manual_optimization_no_validation_and_an_unused_layer(
    tmp_path: Path,
) -> None:
    script = tmp_path / "manual.py"
    script.write_text(code_of("Lightning Trainer").partition("config = nb.load_config")[0] + MANUAL)
    program = [sys.executable, script]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
