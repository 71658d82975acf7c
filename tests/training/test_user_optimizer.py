"""Optimizers, parameter groups and schedules that the user passes to nb.fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, check_equal_weights, configured, model_of, samples
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as rates

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError, FitError
from nbtoolkit.training.optim import make_optimizer
from nbtoolkit.training.samples import permutation


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def another(tmp_path: Path) -> Run:
    return Run(tmp_path / "another")


def by_hand(model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> list[float]:
    """The loop one would write, of 3 epochs of 4 steps: the rate of every step."""
    inputs, targets = samples(37)
    seen = []
    for epoch in (1, 2, 3):
        for rows in permutation(37, seed=42, epoch=epoch).split(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return seen


def logged(run: Run) -> list[float]:
    return [event["values"]["lr"] for event in run.events("metrics")]


CONFIG = configured(overrides={"seed": 42, "checkpoint.weights": "last"})
EVERY = CONFIG.with_overrides({"tracking.log_every_n_steps": 1})


def sgd(model: nn.Module) -> Optimizer:
    head = [*model[-1].parameters()]
    return SGD([{"params": model[0].parameters()}, {"params": head, "lr": 0.3}], 0.1, momentum=0.9)


# --- the optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["object", "function"])
def test_an_optimizer_keeps_its_groups_and_its_rates(run: Run, kind: str) -> None:
    mine, theirs = model_of(), model_of()
    by_hand(mine, sgd(mine))
    run.fit(theirs, config=CONFIG, optimizer=sgd(theirs) if kind == "object" else sgd)
    check_equal_weights(mine, theirs, atol=1e-6)
    assert logged(run) == [0.1] * 6


def test_a_class_of_a_cell_gets_the_rate_and_the_options(run: Run) -> None:
    made = []

    class Mine(SGD):
        def __init__(self, params: Any, lr: float, power: float) -> None:
            super().__init__(params, lr)
            made.append((lr, power))

    config = CONFIG.with_overrides({"optim.options": {"power": 2.0}})
    run.fit(config=config, optimizer=Mine)
    assert made == [(0.1, 2.0)]
    assert len(set(logged(run))) == 6  # the cosine of optim.schedule
    with pytest.raises(FitError, match=r"optimizer=Mine cannot be built: .*'power'"):
        run.fit(config=CONFIG, optimizer=Mine)


def test_a_class_whose_weight_decay_has_no_default_gets_that_of_the_configuration() -> None:
    class Strict(SGD):
        def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    config = configured(overrides={"optim.weight_decay": 0.25})
    made = make_optimizer(config, model_of(), Strict)
    assert [group["weight_decay"] for group in made.param_groups] == [0.25, 0.0]


def test_an_optimizer_that_has_made_steps_goes_on_with_its_state(run: Run) -> None:
    mine, theirs = model_of(), model_of()
    first, second = sgd(mine), sgd(theirs)
    by_hand(mine, first), by_hand(theirs, second)
    by_hand(mine, first)
    run.fit(theirs, config=CONFIG, optimizer=second)
    check_equal_weights(mine, theirs, atol=1e-6)


def other_model(model: nn.Module) -> Optimizer:
    return AdamW(model_of().parameters())


def half(model: nn.Module) -> Optimizer:
    return SGD(model[0].parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (other_model, r"was made before the model was moved or replaced: 4 of its 4 .*\(16, 6\)"),
        (half, r"holds not all trainable parameters of the model: 2\.weight, 2\.bias would never"),
        (lambda model: None, r"is a function that returns no optimizer but NoneType"),
        ("adamw", r"optimizer= is no optimizer but str[\s\S]*model -> Optimizer"),
        (nn.Linear, r"is no optimizer but the class Linear"),
        ({"all": sgd}, r"is a dict of 1, and fit trains[\s\S]*own-loop/several-models\.md"),
        ([sgd, sgd], r"optimizer= is a list of 2"),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            r"optimizer=: the step of LBFGS needs a closure",
        ),
    ],
)
def test_what_is_no_optimizer_of_the_model_is_refused(
    run: Run, optimizer: Any, message: str
) -> None:
    with pytest.raises(FitError, match=message):
        run.fit(config=CONFIG, optimizer=optimizer)


def test_groups_of_the_configuration_do_not_go_with_an_optimizer(run: Run) -> None:
    config = CONFIG.with_overrides({"optim.param_groups": [{"match": "0.*", "lr": 0.1}]})
    with pytest.raises(FitError, match=r"optim.param_groups is set, and optimizer= is an optim"):
        run.fit(config=config, optimizer=sgd)


# --- groups by pattern ---------------------------------------------------------------------------


def grouped(*groups: dict[str, Any], **optim: Any) -> tuple[nn.Module, Optimizer]:
    model = model_of(nn.LayerNorm(16))
    optim = {"name": "adamw", "lr": 0.1, "weight_decay": 0.5, **optim, "param_groups": [*groups]}
    return model, make_optimizer(nb.Config().with_overrides({"optim": optim}), model)


def test_groups_have_their_own_rate_decay_and_arguments() -> None:
    model, optimizer = grouped(
        {"match": "3.*", "lr": 0.02, "betas": [0.5, 0.9]},
        {"match": ["1.*", "0.bias"], "lr_scale": 3, "weight_decay": 0.25},
    )
    known = {id(one): name for name, one in model.named_parameters()}
    found = [
        ([known[id(one)] for one in group["params"]], group["weight_decay"], group.get("lr_scale"))
        for group in optimizer.param_groups
    ]
    assert found == [
        (["0.weight"], 0.5, None),
        (["3.weight"], 0.5, pytest.approx(0.2)),
        (["3.bias"], 0.0, pytest.approx(0.2)),
        (["0.bias", "1.weight", "1.bias"], 0.25, 3),
    ]
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.9, 0.5, 0.5, 0.9]


def test_a_group_of_the_configuration_trains_at_its_rate(run: Run) -> None:
    model, start = model_of(), model_of()
    groups = [{"match": "0.*", "lr_scale": 0}, {"match": "2.bias", "lr": 0.2}]
    run.fit(model, config=CONFIG.with_overrides({"optim.param_groups": groups}))
    assert torch.equal(model[0].weight, start[0].weight)
    assert not torch.equal(model[2].weight, start[2].weight)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "4.*"}], r"'4\.\*' matches no trainable parameter\n.*0\.weight, 0\.bias"),
        (
            [{"match": "0.*"}, {"match": "*.weight"}],
            r"0\.weight would be in two groups, of '0\.\*' and of '\*\.weight'",
        ),
        ([{"match": "0.*", "beta": [0.1, 0.2]}], r"beta of the group '0\.\*' is not[\s\S]*betas"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(FitError, match=message):
        grouped(*groups)


@pytest.mark.parametrize(
    "groups",
    [
        {"match": "0.*"},
        [{"lr": 0.1}],
        [{"match": "0.*", "lr": 0.1, "lr_scale": 2}],
        [{"match": "0.*", "weight_decay": -1}],
    ],
)
def test_groups_that_are_none_are_refused_with_the_configuration(groups: Any) -> None:
    with pytest.raises(ConfigError, match=r"optim\.param_groups[\s\S]*a list of groups {match:"):
        nb.load_config(env=None, overrides={"optim.param_groups": groups})


# --- the schedule --------------------------------------------------------------------------------


SCHEDULES = {
    "steps": lambda optimizer: rates.MultiStepLR(optimizer, [3, 7], gamma=0.5),
    "cycle": lambda optimizer: rates.OneCycleLR(optimizer, 0.2, total_steps=12),
    "factor": lambda step: 1 / (1 + step),
    "lambda": lambda optimizer: rates.LambdaLR(optimizer, lambda step: 0.9**step),
    "several": lambda optimizer: rates.SequentialLR(
        optimizer,
        [rates.LinearLR(optimizer, 0.1, total_iters=4), rates.CosineAnnealingLR(optimizer, 8)],
        milestones=[4],
    ),
}


def scheduled(name: str, optimizer: Optimizer) -> Any:
    make: Any = SCHEDULES[name]
    return rates.LambdaLR(optimizer, make) if name == "factor" else make(optimizer)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.long] * (name != "factor"))
        for name in SCHEDULES
        for kind in ("object", "function")
    ],
)
def test_a_schedule_is_stepped_as_in_a_loop_by_hand(run: Run, name: str, kind: str) -> None:
    mine, theirs = model_of(), model_of()
    first, second = sgd(mine), sgd(theirs)
    expected = by_hand(mine, first, scheduled(name, first))
    schedule = scheduled(name, second) if kind == "object" else SCHEDULES[name]
    run.fit(theirs, config=EVERY, optimizer=second, schedule=schedule)
    assert logged(run) == pytest.approx(expected)
    check_equal_weights(mine, theirs, atol=1e-6)


def test_a_function_may_take_the_steps_of_the_run(run: Run) -> None:
    def schedule(optimizer: Optimizer, steps: int) -> rates.LRScheduler:
        return rates.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    run.fit(config=EVERY, schedule=schedule)  # of the optimizer of optim.name, from optim.lr on
    assert logged(run) == pytest.approx([0.1 * (1 - step / 12) for step in range(12)])


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    "name",
    ["cycle", *(pytest.param(name, marks=pytest.mark.long) for name in ("steps", "several"))],
)
def test_it_resumes_where_the_optimizer_and_the_schedule_were(
    run: Run, another: Run, name: str
) -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        nonlocal left
        left -= model.training
        if left < 0:
            raise Interrupted
        return model(batch[0]), batch[1]

    whole, left = model_of(), 12
    config = EVERY.with_overrides({"checkpoint.every_steps": 2})
    given = {"optimizer": sgd, "schedule": SCHEDULES[name], "step": forward, "config": config}
    another.fit(whole, **given)
    left = 7
    with pytest.raises(Interrupted):
        run.fit(**given)
    resumed, left = model_of(), 6
    run.fit(resumed, **given)
    check_equal_weights(whole, resumed)
    assert logged(run)[-6:] == logged(another)[-6:]


def test_a_plateau_is_stepped_with_the_monitored_metric(run: Run) -> None:
    def plateau(optimizer: Optimizer) -> rates.ReduceLROnPlateau:
        return rates.ReduceLROnPlateau(optimizer, "max", factor=0.1, patience=0, threshold=2.0)

    config = configured(overrides={"checkpoint.monitor": "val_accuracy"})
    run.fit(config=config, metrics=["accuracy"], optimizer=sgd, schedule=plateau)
    assert logged(run) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (3, r"schedule= is 3\n.*optimizer -> LRScheduler"),
        (lambda optimizer: str(optimizer), r"a function that returns a str"),
        (
            lambda optimizer: rates.OneCycleLR(optimizer, 0.2, total_steps=11),
            r"a OneCycleLR of 11 steps, and the run has 12",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(run: Run, schedule: Any, message: str) -> None:
    with pytest.raises(FitError, match=message):
        run.fit(config=CONFIG, optimizer=sgd, schedule=schedule)


def test_an_error_in_the_users_function_is_the_users(run: Run) -> None:
    with pytest.raises(AttributeError, match=r"SGD' object has no attribute 'nothing'"):
        run.fit(config=CONFIG, optimizer=sgd, schedule=lambda optimizer: optimizer.nothing)


def test_a_schedule_of_another_optimizer_is_refused(run: Run) -> None:
    schedule = rates.StepLR(sgd(model_of()), 3)
    with pytest.raises(FitError, match=r"StepLR of another optimizer"):
        run.fit(config=CONFIG, optimizer=sgd, schedule=schedule)
