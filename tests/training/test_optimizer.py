"""Optimizers: any class of torch or of the user, with the arguments it accepts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.training.optim import make_optimizer, make_schedule, set_rate

SHORT = ["adamw", "adam", "sgd", "rmsprop"]


class Descent(Optimizer):
    """A user's own: no weight decay, no closure."""

    def __init__(self, params: Any, lr: float, power: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


class Anything(Descent):
    """A user's own that takes any name, and must have one of them."""

    def __init__(self, params: Any, *, rank: int, **more: Any) -> None:
        super().__init__(params, more["lr"])
        self.rank, self.more = rank, more


class Still(Optimizer):
    """A user's own without a learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass


def model_of(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 3))


def made(name: str, model: nn.Module | None = None, **optim: Any) -> Optimizer:
    config = Config().with_overrides({"optim": {"name": name, "lr": 0.1, **optim}})
    return make_optimizer(config, model or model_of())


# --- which class, with which arguments -----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *SHORT,
        *(f"torch.optim.{name}" for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam")),
        *(f"torch.optim.{name}" for name in ("RAdam", "Rprop", "Adafactor", "SGD", "AdamW")),
        f"{__name__}.Descent",
    ],
)
def test_every_optimizer_learns(name: str) -> None:
    model = model_of(nn.LayerNorm(16))
    optimizer = made(name, model)
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :3].argmax(dim=1)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        set_rate(optimizer, 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-10:]) < losses[0] - 0.05


@pytest.mark.parametrize(
    ("short", "kind"),
    [("adamw", "AdamW"), ("adam", "Adam"), ("sgd", "SGD"), ("rmsprop", "RMSprop")],
)
def test_short_names_are_torchs_classes(short: str, kind: str) -> None:
    mine, theirs = made(short), made(f"torch.optim.{kind}")
    assert type(mine) is type(theirs) is getattr(torch.optim, kind)
    assert mine.defaults == theirs.defaults


def test_options_are_passed_on() -> None:
    options = {"betas": [0.8, 0.95], "eps": 1e-6, "amsgrad": True}
    defaults = made("adamw", options=options).defaults
    assert (defaults["betas"], defaults["eps"], defaults["amsgrad"]) == ((0.8, 0.95), 1e-6, True)
    anything = made(f"{__name__}.Anything", options={"rank": 3, "inner": {"a": [1]}})
    assert (anything.rank, anything.more) == (3, {"lr": 0.1, "inner": {"a": [1]}})


def test_momentum_is_that_of_sgd_and_an_option_of_the_others() -> None:
    assert made("sgd", momentum=0.7, options={"nesterov": True}).defaults["momentum"] == 0.7
    assert made("rmsprop").defaults["momentum"] == 0
    assert made("rmsprop", options={"momentum": 0.5}).defaults["momentum"] == 0.5


def test_a_class_without_a_learning_rate_is_given_none() -> None:
    assert made(f"{__name__}.Still").defaults == {}


def test_torchs_fused_kernels_are_used_unless_others_are_asked_for() -> None:
    assert made("adamw").defaults["fused"]
    assert not made("adamw", options={"fused": False}).defaults["fused"]
    chosen = made("adamw", options={"foreach": True}).defaults
    assert (chosen["foreach"], chosen["fused"]) == (True, None)


def test_a_module_of_ones_own_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_optimizer.py").write_text("from torch.optim import SGD as Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_optimizer", raising=False)
    assert type(made("own_optimizer.Mine")) is torch.optim.SGD
    monkeypatch.delitem(sys.modules, "own_optimizer")


# --- groups --------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """Weights and biases in unusual shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.image_norm = nn.LayerNorm([3, 2])
        self.root_norm = nn.RMSNorm([3, 2])
        self.batch_norm = nn.BatchNorm2d(3)
        self.experts = nn.ParameterDict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2, 3)})
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight  # tied
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in group["params"]]


@pytest.mark.parametrize("name", [*SHORT, "torch.optim.NAdam"])
def test_biases_and_norms_do_not_decay(name: str) -> None:
    model = Shapes()
    decayed, plain = made(name, model, weight_decay=0.1).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert names(model, decayed) == ["embedding.weight", "experts.weight"]
    assert names(model, plain) == [
        "scale",
        *(f"{norm}.{one}" for norm in ("image_norm",) for one in ("weight", "bias")),
        "root_norm.weight",
        "batch_norm.weight",
        "batch_norm.bias",
        "experts.bias",
        "head.bias",
    ]


@pytest.mark.parametrize(
    ("optim", "decay"),
    [
        ({"name": "adamw", "decay_all": True}, 0.01),
        ({"name": "adamw", "weight_decay": 0.0}, 0.0),
        ({"name": "torch.optim.Rprop"}, None),
        ({"name": f"{__name__}.Descent"}, None),
    ],
)
def test_there_is_one_group_where_all_decay_or_none(
    optim: dict[str, Any], decay: float | None
) -> None:
    model = Shapes()
    (group,) = made(model=model, **optim).param_groups
    trainable = [name for name, one in model.named_parameters() if one.requires_grad]
    assert names(model, group) == trainable
    assert group.get("weight_decay") == decay


# --- the rate of a step --------------------------------------------------------------------------


def test_a_group_may_have_a_scale_of_its_own() -> None:
    optimizer = made("sgd", weight_decay=0.1)
    optimizer.param_groups[1]["lr_scale"] = 0.5
    set_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


def test_one_cycle_moves_what_momentum_there_is() -> None:
    config = Config().with_overrides({"optim.schedule": "one_cycle", "optim.warmup_ratio": 0.5})
    adam, sgd, without = made("adamw"), made("sgd"), made("sgd", momentum=0.0)
    schedules = [make_schedule(config, optimizer, steps=10) for optimizer in (adam, sgd, without)]
    for step, expected in ((0, 0.95), (4, 0.85), (9, 0.95)):
        for schedule in schedules:
            schedule.begin_step(step)
        assert adam.param_groups[0]["betas"] == pytest.approx((expected, 0.999))
        assert sgd.param_groups[0]["momentum"] == pytest.approx(expected)
        assert without.param_groups[0]["momentum"] == 0.0


# --- what cannot be built ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "torch.optim.Nadam",
            {},
            r"torch.optim has no optimizer Nadam\n.*adamw.*\n.*check the name",
        ),
        ("__main__.Mine", {}, r"__main__ has no optimizer Mine\n.*\n.*a file beside the notebook"),
        ("torch.optims.SGD", {}, r"No module named 'torch.optims'\n[\s\S]*install"),
        ("nowhere.at_all.SGD", {}, r"nowhere.at_all.SGD cannot be used: .* named 'nowhere'\n"),
        ("torch.nn.Linear", {}, r"torch.nn has no optimizer Linear\n.*a subclass of"),
        ("torch.nn.functional", {}, r"torch.nn has no optimizer functional"),
        ("torch.optim.LBFGS", {}, r"LBFGS needs a closure: .* several times[\s\S]*ctx.prepare"),
        ("adamw", {"beta": [1]}, r"adamw cannot be built: .* 'beta'\n.*betas.*\n.*\(beta\)"),
        ("torch.optim.Rprop", {"zzz": 1}, r"Rprop cannot be built: .* 'zzz'\n.*etas.*\n.*\(zzz\)"),
        (
            f"{__name__}.Anything",
            {},
            r"Anything cannot be built: .*'rank'\n.*rank.*\n.*optim.options",
        ),
        ("adamw", {"betas": [0.9, 2.0]}, r"adamw cannot be built: Invalid beta[\s\S]*\(betas\)"),
        ("adamw", {"betas": 3}, r"adamw cannot be built: .*\n[\s\S]*\(betas\)"),
        ("adamw", {"lr": 1}, r"options.lr is set in place of optim.lr\n.*\n.*remove it"),
        ("sgd", {"momentum": 1}, r"options.momentum is set in place of optim.momentum"),
        (
            "adam",
            {"weight_decay": 0.1},
            r"options.weight_decay is set in place of optim.weight_decay",
        ),
        ("adam", {"params": 1}, r"options.params is set in place of the model's parameters"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        made(name, options=options)


def test_an_error_inside_the_users_module_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_optimizer.py").write_text("import not_there_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        made("broken_optimizer.Mine")
