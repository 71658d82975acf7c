"""Training, sweeps and cross-validation on one NVIDIA GPU give the results of the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gpu_scripts import IMAGES, START, told

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_killed_run_goes_on_to_the_same_weights(precision: str, tmp_path: Path) -> None:
    """Dropout draws on the device: its generator's state and the scaler's are resumed, too."""
    code = f"""
    overrides = {{**settings, **small, "model.dropout": 0.3, "train.precision": "{precision}"}}
    overrides["model.exact"] = True
    found = nb.verify.resume(train, nb.load_config(env=None, overrides=overrides))
    tell(passed=found.passed, text=found.explain(), weights=found.weights, steps=found.steps)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["passed"], answers["text"]
    assert (answers["weights"], answers["steps"]) == (0.0, 40)


def test_the_gpu_computes_what_the_cpu_does(tmp_path: Path) -> None:
    code = """
    exact = {**small, "train.precision": "fp32", "optim.name": "sgd", "optim.lr": 0.1}
    split = {**exact, "train.gradient_accumulation_steps": 2}
    cpu = {**exact, "distributed.enabled": True, "distributed.world_size": 2}
    on = {"gpu": launch(train, config=exact), "parts": launch(train, config=split)}
    weights = {name: result.load_into(make()).state_dict() for name, result in on.items()}
    kinds = [result.plan.device_type for result in on.values()]

    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    weights["cpu"] = launch(train, config=cpu).load_into(make()).state_dict()
    far = {
        name: max((weights["cpu"][key] - there[key]).abs().max().item() for key in there)
        for name, there in weights.items()
    }
    tell(kinds=kinds, far=far)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["kinds"] == ["cuda", "cuda"]
    # convolutions may use TF32 (torch's default): 10 bits of mantissa
    assert answers["far"]["gpu"] < 5e-3
    assert answers["far"]["parts"] < 5e-3


def test_loaders_with_processes_of_their_own_feed_the_gpu(tmp_path: Path) -> None:
    code = """
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            assert torch.utils.data.get_worker_info() is None or not torch.cuda.is_initialized()
            return data[index]

    def reading(config, ctx):
        loss, seen = nn.functional.cross_entropy, set()

        def forward(model, batch):
            seen.add(str(batch[0].device))
            return model(batch[0]), batch[1]

        found = nb.fit(ctx, config, make(), Slow(), data, loss=loss, step=forward)
        return found, sorted(seen)

    with_workers = launch(reading, config={**small, "train.num_workers": 2})
    without = launch(reading, config=small)
    tell(a=with_workers.value, b=without.value)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["a"][1] == ["cuda:0"]
    assert answers["a"][0]["val_loss"] == pytest.approx(answers["b"][0]["val_loss"], abs=1e-3)


def test_class_weights_are_on_the_gpu_where_the_loss_is(tmp_path: Path) -> None:
    code = """
    import functools, os

    def weighted(config, ctx):
        weight = torch.tensor([1.0, 4.0])
        losses = {
            "module": nn.CrossEntropyLoss(weight=weight),
            "partial": functools.partial(nn.functional.cross_entropy, weight=weight),
        }
        return {
            kind: nb.fit(ctx, config, make(), data, data, loss=loss)["val_loss"]
            for kind, loss in losses.items()
        }

    sweep_config = {**small, "train.precision": "fp32", "train.gradient_accumulation_steps": 2}
    gpu = launch(weighted, config=sweep_config).value
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    tell(gpu=gpu, cpu=launch(weighted, config=sweep_config).value)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    for kind in ("module", "partial"):
        assert answers["gpu"][kind] == pytest.approx(answers["cpu"][kind], rel=0.05)


def test_class_weights_in_a_lambda_are_to_be_moved(tmp_path: Path) -> None:
    code = """
    weight = torch.tensor([1.0, 4.0])

    def weighted(config, ctx):
        loss = lambda out, y: nn.functional.cross_entropy(out, y, weight=weight)
        return nb.fit(ctx, config, make(), data, data, loss=loss)

    try:
        launch(weighted, config=small)
        notes = []
    except RuntimeError as error:
        notes = error.__notes__
    tell(notes=notes)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert ".to(outputs.device) in a loss" in "\n".join(answers["notes"])


def test_a_loop_of_ones_own_trains_on_the_gpu(tmp_path: Path) -> None:
    code = """
    import os

    def own(config, ctx):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=False)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        weigh = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0])).to(ctx.device)
        for epoch in range(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = weigh(model(inputs), targets)
                ctx.accelerator.backward(loss)
                optimizer.step()
            ctx.report({"loss": loss.item()}, step=epoch + 1)
        ctx.save({"model": model.state_dict()})
        return loss.item(), str(inputs.device)

    sweep_config = {"train.precision": "fp32", "train.batch_size": 64}
    gpu = launch(own, config=sweep_config).value
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    tell(gpu=gpu, cpu=launch(own, config=sweep_config).value)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert [answers[kind][1] for kind in ("gpu", "cpu")] == ["cuda:0", "cpu"]
    assert answers["gpu"][0] == pytest.approx(answers["cpu"][0], rel=0.05)


def test_a_compiled_model_trains_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code = """
    def compiled(config, ctx):
        loss = nn.functional.cross_entropy
        return nb.fit(ctx, config, make(), data, data, loss=loss, metrics="accuracy")

    result = launch(compiled, config={**small, "train.compile": True})
    model = result.load_into(make())
    right = (model(images).argmax(1) == labels).float().mean().item()
    tell(reported=result.value["val_accuracy"], right=right)
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["reported"] > 0.8
    assert answers["right"] == pytest.approx(answers["reported"], abs=0.02)


def test_a_sweep_frees_the_gpu_and_goes_on_after_a_trial_without_memory(tmp_path: Path) -> None:
    code = """
    from nbtoolkit.environment.hardware import sample_devices

    def used():
        return sample_devices([nb.detect_hardware().usable[0].uuid])[0]["memory_used"]

    def hungry(config, ctx):
        if config.model.size > 100:
            torch.ones(2**40, device=ctx.device)
        return train(config, ctx)

    before = used()
    space = {
        "study": {"metric": "val_accuracy", "sampler": "grid", "pruner": "none"},
        "space": {"model.size": [1, 2, 1000]},
    }
    config = nb.load_config(env=None, overrides={**settings, **small})
    found = nb.sweep(hungry, config, space, display="off")
    states = sorted(trial.state.name for trial in found.study.trials)
    tell(states=states, best=found.best_value, grown=used() - before,
         touched=torch.cuda.is_initialized())
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["states"] == ["COMPLETE", "COMPLETE", "PRUNED"]  # infeasible
    assert answers["best"] > 0.8
    assert answers["grown"] < 64 * 2**20
    assert answers["touched"] is False


def test_folds_predict_every_sample_on_the_gpu(tmp_path: Path) -> None:
    code = """
    def folded(config, ctx):
        from torch.utils.data import Subset
        model, loss = make(), nn.functional.cross_entropy
        parts = [Subset(data, rows) for rows in (ctx.fold.train_indices, ctx.fold.valid_indices)]
        found = nb.fit(ctx, config, model, *parts, loss=loss, metrics="accuracy")
        return {**found, "device": str(ctx.device)}

    folds = nb.make_folds(labels, k=3)
    config = nb.load_config(env=None, overrides={**settings, **small})
    found = nb.cross_validate(folded, config, folds, display="off")
    tell(values=[one["val_accuracy"] for one in found.values],
         devices=[one["device"] for one in found.values])
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["devices"] == ["cuda:0"] * 3
    assert min(answers["values"]) > 0.7


def test_the_doctor_finds_the_gpu_and_leaves_the_kernel_without_cuda(tmp_path: Path) -> None:
    code = """
    report = nb.doctor()
    tell(text=str(report), touched=torch.cuda.is_initialized(),
         name=nb.detect_hardware().usable[0].name)
    """
    answers = told(code, tmp_path)
    assert answers["name"] in answers["text"]
    assert answers["touched"] is False


def test_torchrun_trains_on_the_gpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import nbtoolkit as nb\n" + START + IMAGES + "if __name__ == '__main__':\n"
        "    result = launch(train, config=small)\n"
        "    tell(accuracy=result.value['val_accuracy'], kind=result.plan.device_type)\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*words, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # torchrun leaves its log folder behind
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0", "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["accuracy"] > 0.8
    assert answers["kind"] == "cuda"


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaged_weights_are_resumed_exactly(kind: str, tmp_path: Path) -> None:
    code = f"""
    more = {{"train.weight_averaging": "{kind}", "train.precision": "bf16", "train.swa_start": 0.3}}
    overrides = {{**settings, **small, **more, "model.exact": True}}
    found = nb.verify.resume(train, nb.load_config(env=None, overrides=overrides))
    tell(passed=found.passed, text=found.explain())
    """
    answers = told(IMAGES + textwrap.dedent(code), tmp_path)
    assert answers["passed"], answers["text"]


def test_both_stages_of_metric_learning_train_on_the_gpu(tmp_path: Path) -> None:
    code = """
    from nbtoolkit.extras import metric_learning

    stages = {"model.stage1": {"train": {"epochs": 6}, "optim": {"lr": 3e-3}}}
    base = nb.load_config(METRIC_LEARNING, env=None)
    config = base.with_overrides({**settings, **stages})
    result = nb.launch(metric_learning.train, config, display="off")
    values = [result.value["val_map"], result.value["val_accuracy"]]
    tell(values=values, kind=result.plan.device_type, precision=result.plan.precision)
    """
    answers = told(code, tmp_path)
    assert answers["kind"] == "cuda"
    assert answers["precision"] != "fp32"
    assert min(answers["values"]) > 0.8
