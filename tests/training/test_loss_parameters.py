"""A loss with parameters of its own: nb.fit trains, synchronises, saves and restores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, check_equal_weights, configured, launch, model_of, samples
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.training.samples import permutation
from nbtoolkit.worker.context import RunContext


class Centres(nn.Module):
    """Distances to a learned centre of each class, and a learned scale."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.arange(3.0 * width).reshape(3, width) / 9)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = (outputs - self.centres[targets]).square().sum(1)
        return (squares * torch.exp(-self.log_scale) + self.log_scale).mean()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def another(tmp_path: Path) -> Run:
    return Run(tmp_path / "another")


LAST = configured(overrides={"checkpoint.weights": "last", "optim.schedule": "constant"})


def by_hand(model: nn.Module, loss: nn.Module) -> None:
    """The loop one would write, of 3 epochs of 4 steps."""
    inputs, targets = samples(37)
    optimizer = SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    for epoch in (1, 2, 3):
        for rows in permutation(37, seed=LAST.seed, epoch=epoch).split(12):
            optimizer.zero_grad()
            loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()


def factory(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [None, SGD, factory, "object", "has them already"])
def test_the_parameters_of_a_loss_are_trained_as_in_a_loop_by_hand(
    run: Run, optimizer: Any, capsys: Any
) -> None:
    mine, theirs, my_loss, their_loss = model_of(), model_of(), Centres(), Centres()
    by_hand(mine, my_loss)
    if optimizer == "object":
        optimizer = factory(theirs)
    elif optimizer == "has them already":
        optimizer = SGD([*theirs.parameters(), *their_loss.parameters()], lr=0.1, momentum=0.9)
    run.fit(theirs, config=LAST, loss=their_loss, optimizer=optimizer)
    check_equal_weights(mine, theirs, atol=1e-6)
    check_equal_weights(my_loss, their_loss, atol=1e-6)
    line = "the parameters of the loss are trained, too: loss.centres (3, 3), loss.log_scale ()"
    assert line in capsys.readouterr().out


def test_a_stopped_run_goes_on_with_the_parameters_of_the_loss(run: Run, another: Run) -> None:
    config = configured(overrides={"optim.name": "adamw", "optim.weight_decay": 0.1})
    whole, resumed = Centres(), Centres()
    model = model_of()
    expected = run.fit(model, config=config, loss=whole)
    ctx = another.context(config)
    another.record.request_stop("stopped", "the test")
    with pytest.raises(nb.RunStopped):
        nb.fit(ctx, config, model_of(), samples(37), samples(11, seed=1), loss=Centres())
    assert another.fit(config=config, loss=resumed) == expected
    check_equal_weights(whole, resumed)
    assert not torch.equal(whole.centres, Centres().centres)
    # The model's file has the model alone.
    check_equal_weights(
        nb.load_model(next(another.paths.checkpoints.glob("step-*")), model_of()), model
    )


def test_the_loss_ends_with_the_best_epoch_and_its_weights_are_beside_the_models(run: Run) -> None:
    seen = []

    class Watch(nb.Callback):
        def on_validation_end(self, state: Any) -> dict[str, float]:
            seen.append(loss.centres.detach().clone())
            return {"val_mark": float(state.epoch != 2)}

    loss, overrides = Centres(), {"checkpoint.monitor": "val_mark", "checkpoint.mode": "min"}
    run.fit(config=configured(overrides=overrides), loss=loss, callbacks=[Watch()])
    torch.testing.assert_close(loss.centres.detach(), seen[1], atol=0, rtol=0)
    (best,) = run.paths.checkpoints.glob("best-*")
    saved = torch.load(best / "loss_parameters.pt", weights_only=True)
    torch.testing.assert_close(saved["centres"], seen[1], atol=0, rtol=0)
    torch.testing.assert_close(run.saved("loss_parameters")["centres"], seen[2], atol=0, rtol=0)


def test_a_loss_that_holds_the_model_trains_it_once(run: Run, another: Run, capsys: Any) -> None:
    class Penalty(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(outputs, targets)

    one, other = model_of(), model_of()
    run.fit(one, config=LAST)
    another.fit(other, config=LAST, loss=Penalty(other))
    check_equal_weights(one, other)
    assert "of the loss" not in capsys.readouterr().out


def test_a_schedule_made_before_the_parameters_of_the_loss_joined_is_refused(run: Run) -> None:
    model = model_of()
    optimizer = factory(model)
    schedule = StepLR(optimizer, 2)
    what = r"a StepLR for 1 groups of parameters, and its optimizer has 2: the loss has parameters"
    with pytest.raises(FitError, match=what):
        run.fit(model, loss=Centres(), optimizer=optimizer, schedule=schedule)


# --- several ranks -------------------------------------------------------------------------------


def on_ranks(config: Config, ctx: RunContext) -> dict[str, Any]:
    torch.manual_seed(ctx.rank)  # rank 0's parameters count
    loss = Centres()
    with torch.no_grad():
        loss.centres.add_(torch.rand(3, 3) if ctx.rank else 0.0)
    values = nb.fit(ctx, config, model_of(), samples(37), samples(11, seed=1), loss=loss)
    rows = Centres()
    model = model_of()
    nb.fit(ctx, config, model, samples(37), None, loss=nb.all_rows(rows))
    parts = {"loss": loss, "rows": rows, "model": model}
    states = {name: {k: v.tolist() for k, v in m.state_dict().items()} for name, m in parts.items()}
    return {"values": values, **states}


def _flat(state: Any) -> Tensor:
    return torch.cat([torch.as_tensor(value).flatten() for value in state.values()])


def test_the_parameters_of_a_loss_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    config = LAST.with_overrides({"runtime.output_dir": str(tmp_path)})
    passes = {"train.gradient_accumulation_steps": 2}
    one = launch(on_ranks, config, 1).value
    first, second = launch(on_ranks, config.with_overrides(passes), 2).values
    assert first == second
    assert first["values"] == pytest.approx(one["values"], abs=1e-5)
    for name in ("loss", "rows", "model"):
        torch.testing.assert_close(_flat(first[name]), _flat(one[name]), atol=1e-5, rtol=0)
    assert not torch.allclose(_flat(one["rows"]), _flat(Centres().state_dict()))
