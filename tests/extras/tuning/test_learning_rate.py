"""Learning rates: the range test against a loop by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, configured, model_of, samples
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import nbtoolkit as nb
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.learning_rate import diverged, smoothed, suggest

SGD = {"optim.name": "sgd", "optim.momentum": 0.0, "optim.weight_decay": 0.0}


def configuration(folder: Path, **more: Any) -> nb.Config:
    settings = {
        **SGD,
        "optim.schedule": "constant",
        "train.epochs": 2,
        "train.batch_size": 16,
        "tracking.mlflow": False,
        "runtime.output_dir": str(folder / "outputs"),
        "data.marks": str(folder / "marks"),
    }
    return nb.load_config(env=None, overrides={**settings, **more})


def learns(config: Any, ctx: Any) -> Any:
    """Fit a small model; leave a line with the rate for each call."""
    if ctx.is_main:
        with Path(config.data.marks).open("a") as marks:
            marks.write(f"{config.optim.schedule} {config.optim.lr}\n")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    rows = slice(None) if ctx.fold is None else torch.as_tensor(ctx.fold.train_indices)
    inputs, labels = samples(64)
    data = (inputs[rows], labels[rows])
    return nb.fit(ctx, config, model, data, samples(16, seed=1), loss=cross_entropy)


def marks(config: nb.Config) -> list[str]:
    return Path(config.data.marks).read_text().splitlines()


# --- the range test ---


RULE = {"train.batch_size_per_device": 8, "optim.lr_rule": "linear"}


@pytest.mark.parametrize(("ranks", "factor"), [(1, 1.0), (2, 2.0)], ids=["one", "two-by-rule"])
def test_the_curve_and_the_suggestion_are_those_of_a_loop_by_hand(
    tmp_path: Path, ranks: int, factor: float
) -> None:
    model, (inputs, labels) = model_of(), samples(64)

    def train(config: Any, ctx: Any) -> Any:
        data = (inputs, labels)
        return nb.fit(ctx, config, model, data, None, loss=cross_entropy, sampler=range(64))

    config = configuration(tmp_path)
    if ranks == 2:
        values = {**config.to_dict()}
        del values["train"]["batch_size"]
        config = nb.Config.model_validate(values).with_overrides(RULE)
    before = copy.deepcopy(model.state_dict())
    found = nb.find_learning_rate(train, config, low=1e-3, high=3.0, steps=50, processes=ranks)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])

    rates = [1e-3 * 3000 ** (step / 49) for step in range(50)]
    optimizer, losses = torch.optim.SGD(model.parameters()), []
    for step, rate in enumerate(rates):
        rows = slice(16 * (step % 4), 16 * (step % 4) + 16)
        loss = cross_entropy(model(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step()
        losses.append(loss.item())
    count = len(found.losses)
    assert count > 40
    assert found.rates == pytest.approx(rates[:count])
    assert found.losses == pytest.approx(losses[:count], abs=1e-5)

    means = [
        sum(0.9 ** (i - j) * losses[j] for j in range(i + 1)) / sum(0.9**j for j in range(i + 1))
        for i in range(count)
    ]
    slopes = {
        (means[i + 1] - means[i - 1]) / math.log(rates[i + 1] / rates[i - 1]): rates[i]
        for i in range(10, count - 5)
    }
    lowest = min(zip(means, rates, strict=False))[1]
    assert found.suggestion == pytest.approx(min(slopes[min(slopes)], lowest / 10), rel=6e-3)
    assert found.settings == {"optim.lr": found.suggestion}
    assert f"suggestion {found.suggestion:g}" in found.plot().html


def test_a_loss_that_never_falls_is_refused_with_its_values(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        def constant(outputs: Any, targets: Any) -> Any:
            return 1.5 + 0 * outputs.sum(dim=1)

        return nb.fit(ctx, config, model_of(), samples(64), None, loss=constant)

    with pytest.raises(TuningError, match=r"(?s)falls at no rate.*1\.5 at the start.*check the"):
        nb.find_learning_rate(train, configuration(tmp_path), steps=30)


def test_a_loss_that_overflows_ends_the_test_with_an_answer(tmp_path: Path) -> None:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def train(config: Any, ctx: Any) -> Any:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        data = (inputs, inputs.sum(dim=1, keepdim=True))
        return nb.fit(ctx, config, model, data, None, loss=mse_loss)

    config = configuration(tmp_path)
    found = nb.find_learning_rate(train, config, low=1e-4, high=1e30, steps=400)
    assert 10 < len(found.losses) < 400
    assert 1e-4 < found.suggestion < 1


def test_a_function_with_rates_of_its_own_is_refused(tmp_path: Path) -> None:
    def train(config: Any, ctx: Any) -> Any:
        config = config.with_overrides({"optim.schedule": "constant"})
        return nb.fit(ctx, config, model_of(), samples(64), None, loss=cross_entropy)

    with pytest.raises(TuningError, match=r"rates of its own, from 0\.1 to 0\.1"):
        nb.find_learning_rate(train, configuration(tmp_path), low=1e-4, high=0.1, steps=30)

    with pytest.raises(TuningError, match="at least 30 steps"):
        nb.find_learning_rate(train, configuration(tmp_path), steps=3)


def test_the_suggestion_needs_a_fall_above_the_noise() -> None:
    rates = [1e-6 * 10 ** (step / 10) for step in range(60)]
    noisy = [1 + 0.2 * math.sin(40 * step) for step in range(60)]
    with pytest.raises(TuningError, match="falls at no rate"):
        suggest(rates, noisy)
    falling = [loss - 0.9 / (1 + math.exp(30 - step)) for step, loss in enumerate(noisy)]
    assert rates[27] < suggest(rates, falling) < rates[42]
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert not diverged([*falling, 1.0])
    assert diverged([1.0] * 20 + [40.0])
    assert diverged([-1.0] * 20 + [40.0])
    assert not diverged([-1.0] * 20 + [-0.5])


# --- the schedule in fit ---


RANGE = {"optim.schedule": "range_test", "optim.lr": 1.0, "optim.min_lr_ratio": 1e-4}


class Rates:
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, state: nb.FitState) -> None:
        self.seen.append([group["lr"] for group in state.optimizer.param_groups])


def seen(folder: Path, config: nb.Config, **more: Any) -> list[list[float]]:
    rates = Rates()
    folder.parent.mkdir(exist_ok=True)
    Run(folder).fit(config=config, callbacks=[rates], valid_data=None, **more)
    return rates.seen


def test_an_optimizer_of_the_users_own_has_the_rates_in_its_proportions(tmp_path: Path) -> None:
    def optimizer(model: Any) -> Any:
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.2)

    config = configured(overrides=RANGE)
    by_hand = {"optimizer": optimizer, "schedule": lambda step: 0.5}
    rates = seen(tmp_path / "run", config, **by_hand)
    count = len(rates)
    assert count == 12
    expected = [1e-4 ** (1 - step / (count - 1)) for step in range(count)]
    assert [first for first, _ in rates] == pytest.approx(expected)
    assert [second for _, second in rates] == pytest.approx([rate / 10 for rate in expected])


def test_groups_of_the_configuration_keep_their_scale(tmp_path: Path) -> None:
    groups = {"optim.param_groups": [{"match": "2.*", "lr_scale": 0.25}]}
    rates = seen(tmp_path / "run", configured(overrides={**RANGE, **groups}))
    assert rates[-1] == pytest.approx([1.0, 0.25])
    assert rates[0] == pytest.approx([1e-4, 0.25e-4])


def test_an_answer_is_kept_and_stands_for_later_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path)
    found = nb.find_learning_rate(learns, config, processes=1)
    assert "measured in" in capsys.readouterr().out
    again = nb.find_learning_rate(learns, config.with_overrides(found.settings), processes=1)
    assert (again.kept, again.suggestion) == (True, found.suggestion)
    assert marks(config) == ["range_test 1.0"]
    assert not nb.find_learning_rate(learns, config, processes=1, force=True).kept
