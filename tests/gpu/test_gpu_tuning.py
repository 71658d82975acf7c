"""What is measured before a long run, and what becomes of a run without memory, on one GPU."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from gpu_scripts import IMAGES, told

pytestmark = pytest.mark.gpu

# A model whose sample takes some 50 MB, in a fiftieth of the card's memory.
HUNGRY = IMAGES + textwrap.dedent("""
    class Wide(nn.Module):
        def forward(self, x):
            wide = (x[:, :1] * torch.ones(2**22, device=x.device)).exp()
            return x + 1e-9 * wide.mean(1, keepdim=True)

    def hungry(config, ctx):
        torch.cuda.set_per_process_memory_fraction(0.02)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Wide(), nn.Linear(8, 2))
        loss = nn.functional.cross_entropy
        return nb.fit(ctx, config, model, data, None, loss=loss)

    large = {**small, "train.epochs": 1, "train.batch_size": 320, "train.precision": "fp32"}
""")


def test_the_largest_batch_is_found_and_fits(tmp_path: Path) -> None:
    code = """
    config = nb.load_config(env=None, overrides={**settings, **large})
    found = nb.find_batch_size(hungry, config)
    result = launch(hungry, config={**large, **found.settings})
    tell(largest=found.largest, table=str(found), steps=found.accumulation_steps,
         planned=result.plan.accumulate, reasons=[row.reason for row in found.rows],
         touched=torch.cuda.is_initialized())
    """
    answers = told(HUNGRY + textwrap.dedent(code), tmp_path)
    assert 8 <= answers["largest"] < 320, answers["table"]
    assert any("memory" in reason for reason in answers["reasons"])
    assert answers["planned"] == answers["steps"] > 1
    assert answers["touched"] is False


def test_a_run_out_of_memory_takes_more_accumulation_steps(tmp_path: Path) -> None:
    code = """
    result = launch(hungry, config=large)
    roomy = launch(hungry, config={**large, "train.gradient_accumulation_steps": 80})
    tell(steps=result.plan.accumulate, loss=result.value["train_loss"],
         same=roomy.value["train_loss"])
    """
    answers = told(HUNGRY + textwrap.dedent(code), tmp_path)
    assert answers["steps"] > 1
    assert answers["loss"] == pytest.approx(answers["same"], abs=1e-4)


def test_a_learning_rate_is_found(tmp_path: Path) -> None:
    code = """
    config = nb.load_config(env=None, overrides={**settings, **small})
    found = nb.find_learning_rate(train, config)
    value = launch(train, config={**small, **found.settings}).value
    tell(rate=found.settings["optim.lr"], accuracy=value["val_accuracy"],
         touched=torch.cuda.is_initialized())
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert 1e-5 < answers["rate"] < 1
    assert answers["accuracy"] > 0.8
    assert answers["touched"] is False


def test_every_variant_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code = """
    config = nb.load_config(env=None, overrides={**settings, **small})
    choices = [{"train.precision": name} for name in ("fp32", "fp16")]
    choices += [{"train.channels_last": True}, {"train.compile": True}, {"train.num_workers": 1}]
    found = nb.compare(train, config, choices)
    rows = [[row.settings, row.samples_per_second, row.reason, row.memory] for row in found.rows]
    tell(rows=rows, table=str(found))
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert not [row for row in answers["rows"] if row[2]], answers["table"]
    assert all(row[1] > 0 and row[3] > 0 for row in answers["rows"])
    assert len(answers["rows"]) == 5


def test_one_device_is_calibrated(tmp_path: Path) -> None:
    code = """
    config = nb.load_config(env=None, overrides={**settings, **small})
    found = nb.calibrate(train, config)
    result = launch(train, config={**small, "distributed.strategy": "measured"})
    tell(table=str(found), speeds=[row.samples_per_second for row in found.rows],
         strategy=result.plan.strategy, efficiency=result.efficiency)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["speeds"][0] > 0, answers["table"]
    assert answers["strategy"] == "single"


def test_a_profile_shows_the_kernels_of_the_gpu(tmp_path: Path) -> None:
    code = """
    import gzip

    plain = launch(train, config={**small, "train.precision": "fp32", "model.exact": True})
    more = {"train.profile": True, "train.precision": "fp32", "model.exact": True}
    result = launch(train, config={**small, **more}, resume="never")
    with gzip.open(result.paths.trace(0), "rt") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    tell(kinds=sorted(filter(None, kinds)), shares=result.step_time,
         losses=[plain.value["val_loss"], result.value["val_loss"]])
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert {"kernel", "cuda_runtime", "cpu_op"} <= set(answers["kinds"])
    assert answers["losses"][0] == answers["losses"][1]
    assert sum(answers["shares"].values()) == pytest.approx(1.0, abs=0.02)
    assert answers["shares"].keys() == {"data", "compute"}  # one rank waits for no other


def test_a_benchmark_measures_the_gpu(tmp_path: Path) -> None:
    code = """
    config = nb.load_config(env=None, overrides={**settings, **small})
    found = nb.benchmark(train, config, sections=["communication", "memory"])
    rows = [[row.section, row.name, row.value, row.note] for row in found.rows]
    card = nb.detect_hardware().usable[0].name
    tell(table=found.table(), rows=rows, machine=found.machine, card=card)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    measured = [row[2] for row in answers["rows"] if row[0] == "memory"]
    assert measured, answers["table"]
    assert all(value is not None for value in measured), answers["table"]
    assert answers["machine"].startswith(answers["card"])
