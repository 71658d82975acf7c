"""Several optimizers in a step of the user's own: a GAN, on one rank and on two."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, check_equal_weights, configured, samples
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, FitError, WorkerDied
from nbtoolkit.training.loading.sampler import GlobalBatchSampler
from nbtoolkit.worker.random_numbers import derive_seed

# --- PyTorch's DCGAN tutorial --------------------------------------------------------------------

nz, nc, ngf, ndf = 6, 1, 4, 4
criterion = nn.BCELoss()


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
        nn.BatchNorm2d(ngf * 2),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ndf * 2),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    )


def gan() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"G": generator(), "D": discriminator()})
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(layer.weight, 0.0, 0.02)
    return model


def images(size: int = 22) -> torch.Tensor:
    return torch.randn(size, nc, 16, 16, generator=torch.Generator().manual_seed(1)).tanh()


def tutorials_loop(model: nn.ModuleDict, *, seed: int, epochs: int) -> list[tuple[float, float]]:
    """Its training loop, with the order and the random numbers of fit: the losses of each step.

    In place of the data loader: the order of fit.
    """
    data, losses, device = images(), [], "cpu"
    netG, netD = model["G"], model["D"]
    optimizerD = Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    order = GlobalBatchSampler(size=len(data), batch=8, micro=8, seed=seed)
    for epoch in range(1, epochs + 1):
        torch.manual_seed(derive_seed(seed, "epoch", epoch, 0))
        for rows in order.permutation(epoch).split(8):
            netD.zero_grad()
            real_cpu = data[rows].to(device)
            b_size = real_cpu.size(0)
            label = torch.full((b_size,), 1.0, dtype=torch.float, device=device)
            output = netD(real_cpu).view(-1)
            errD_real = criterion(output, label)
            errD_real.backward()
            noise = torch.randn(b_size, nz, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(0.0)
            output = netD(fake.detach()).view(-1)
            errD_fake = criterion(output, label)
            errD_fake.backward()
            errD = errD_real + errD_fake
            optimizerD.step()
            netG.zero_grad()
            label.fill_(1.0)
            output = netD(fake).view(-1)
            errG = criterion(output, label)
            errG.backward()
            optimizerG.step()
            losses.append((errD.item(), errG.item()))
    return losses


def step(model: Any, batch: Any, optimizers: Any) -> dict[str, torch.Tensor]:
    fake = model["G"](torch.randn(len(batch), nz, 1, 1, device=batch.device))
    real, made = model["D"](batch).view(-1), model["D"](fake.detach()).view(-1)
    one, zero = torch.ones_like(real), torch.zeros_like(real)
    loss_d = criterion(real, one) + criterion(made, zero)
    optimizers["D"].backward(loss_d)
    optimizers["D"].step()
    loss_g = criterion(model["D"](fake).view(-1), one)
    optimizers["G"].backward(loss_g)
    optimizers["G"].step()
    return {"d": loss_d, "g": loss_g}


def adams(model: Any) -> dict[str, Any]:
    return {name: Adam(model[name].parameters(), 2e-3, betas=(0.5, 0.999)) for name in ("D", "G")}


GAN = configured(overrides={"train.batch_size": 8, "train.epochs": 2})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def another(tmp_path: Path) -> Run:
    return Run(tmp_path / "another")


def given(model: nn.Module, **more: Any) -> dict[str, Any]:
    own = {"optimizer": adams(model), "step": step, "train_data": images(), "valid_data": None}
    return {"config": GAN, "loss": None, **own, **more}


@pytest.mark.long
def test_the_losses_of_the_dcgan_tutorial_are_those_of_its_loop(run: Run) -> None:
    """The training code takes 14 lines here and 30 in the tutorial.

    Here: 11 of ``step``, 2 of ``adams`` and the call of ``nb.fit``. In the tutorial
    (beginner_source/dcgan_faces_tutorial.py): 21 from ``netD.zero_grad()`` to
    ``optimizerG.step()`` without D(x) and D(G(z)), 2 loops, 2 optimizers, 2 label values, the
    device, and 2 of the DataLoader. Not counted, here and there: blank lines, comments, the nets,
    printing and pictures. Checkpoints, resuming, logging, several ranks and mixed precision are
    in these 14 lines, too.
    """
    mine, theirs = gan(), gan()
    seen: list[tuple[float, float]] = []

    def watched(model: Any, batch: Any, optimizers: Any) -> Any:
        losses = step(model, batch, optimizers)
        seen.append((losses["d"].item(), losses["g"].item()))
        return losses

    expected = tutorials_loop(mine, seed=GAN.seed, epochs=2)
    result = run.fit(theirs, **given(theirs, step=watched))
    assert len(seen) == 6
    for one, other in zip(seen, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    check_equal_weights(mine, theirs, atol=1e-4)
    last = [(d * 8 * w, g * 8 * w) for (d, g), w in zip(expected[3:], (1, 1, 6 / 8), strict=True)]
    mean_d, mean_g = (sum(column) / 22 for column in zip(*last, strict=True))
    assert result["train_d"] == pytest.approx(mean_d, abs=1e-5)
    assert result["train_g"] == pytest.approx(mean_g, abs=1e-5)
    assert result["train_loss"] == pytest.approx(mean_d + mean_g, abs=1e-5)


class Interrupted(Exception):
    pass


@pytest.mark.long
def test_it_resumes_with_every_optimizer_and_schedule(run: Run, another: Run) -> None:
    def breaking(model: Any, batch: Any, optimizers: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Interrupted
        return step(model, batch, optimizers)

    def fitted(folder: Run) -> nn.Module:
        model = gan()
        optimizers = adams(model)
        schedule = {"D": StepLR(optimizers["D"], 2), "G": lambda step: 1 / (1 + step)}
        config = GAN.with_overrides({"checkpoint.every_steps": 2, "train.max_grad_norm": 0.1})
        settings = {"config": config, "step": breaking, "schedule": schedule}
        folder.fit(model, **given(model, optimizer=optimizers, **settings))
        rates.append([one.param_groups[0]["lr"] for one in optimizers.values()])
        return model

    rates: list[list[float]] = []
    left = 100
    whole, left = fitted(another), 5
    with pytest.raises(Interrupted):
        fitted(run)
    left = 2
    check_equal_weights(whole, fitted(run))
    assert rates[0] == rates[1] == pytest.approx([2e-6, 2e-3 / 6])
    assert run.saved()["optimizers"]["G"]["steps"] == 6


def test_a_reported_loss_does_not_depend_on_when_it_is_read(run: Run, another: Run) -> None:
    """It is read once a second, and for a checkpoint: a resumed run reads it at other steps."""
    found = []
    for folder, often in ((run, {"checkpoint.every_steps": 1}), (another, {})):
        model = gan()
        config = GAN.with_overrides({**often, "train.batch_size": 2, "train.epochs": 1})
        found.append(folder.fit(model, **given(model, config=config)))
    assert found[0] == found[1]


def test_each_optimizer_clips_and_scales_its_own_gradients(run: Run) -> None:
    norms: dict[str, float] = {}

    def watched(model: Any, batch: Any, optimizers: Any) -> Any:
        for name, factor in (("D", 1.0), ("G", 100.0)):
            outputs = model[name](batch if name == "D" else torch.ones(8, nz, 1, 1))
            optimizers[name].zero_grad()
            optimizers[name].backward(outputs.mean() * factor)
            optimizers[name].step()
            grads = [one.grad.norm() for one in model[name].parameters()]
            norms[name] = float(torch.stack(grads).norm())
        return outputs.mean()

    model = gan()
    optimizers = {name: SGD(model[name].parameters(), 0.0) for name in ("D", "G")}
    config = GAN.with_overrides({"train.max_grad_norm": 1e-3, "train.max_steps": 1})
    run.fit(model, **given(model, optimizer=optimizers, step=watched, config=config))
    assert norms == pytest.approx({"D": 1e-3, "G": 1e-3}, rel=1e-2)


def test_each_has_a_loss_scale_of_its_own(run: Run) -> None:
    """In fp16 an overflow of one optimizer's gradients skips its step and no other's."""

    def overflowing(model: Any, batch: Any, optimizers: Any) -> torch.Tensor:
        for name, factor in (("D", 1.0), ("G", 1e38)):
            optimizers[name].backward(next(model[name].parameters()).sum() * factor)
            optimizers[name].step()
        return torch.ones(())

    model, start = gan(), gan()
    context = run.context(GAN)
    context.plan = dataclasses.replace(context.plan, precision="fp16")
    config = GAN.with_overrides({"train.max_steps": 1})
    data = given(model, step=overflowing, config=config)
    nb.fit(context, data.pop("config"), model, data.pop("train_data"), None, **without_valid(data))
    saved = run.saved()["optimizers"]
    assert [saved[name]["scaler"]["scale"] for name in ("D", "G")] == [65536.0, 32768.0]
    first, second = (next(model[name].parameters()) for name in ("D", "G"))
    assert not torch.equal(first, next(start["D"].parameters()))
    assert torch.equal(second, next(start["G"].parameters()))


def without_valid(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "valid_data"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimizer": {}}, r"optimizer= is an empty dict"),
        ({"step": None}, r"several optimizers need a step of your own, and step= takes 0 argu"),
        ({"step": lambda model, batch: 0}, r"need a step of your own, and step= takes 2 arguments"),
        ({"schedule": {"g": lambda step: 1}}, r"schedule= names 'g', and there is no optimizer"),
        ({"valid_data": images()}, r"fit has no loss for the validation"),
        ({"step": lambda model, batch, optimizers: 3}, r"the step returned a int"),
        (
            {"step": lambda model, batch, optimizers: optimizers["G"].step()},
            r"the optimizer 'G' makes a step, and none of its parameters has a gradient",
        ),
        ({"optimizer": {"G": lambda model: Adam(model["G"].parameters())}}, r"D\.0\.weight, .*wou"),
        ({"optimizer": {"G": Adam}}, r"optimizer\['G'\] is no optimizer but the class Adam"),
        (
            {"config": GAN.with_overrides({"train.gradient_accumulation_steps": 2})},
            r"several optimizers cannot accumulate gradients, and a step takes 2 passes",
        ),
        (
            {"config": GAN.with_overrides({"train.compile": True})},
            r"several optimizers do not go with train.compile",
        ),
    ],
)
def test_what_several_optimizers_cannot_do_is_refused(
    run: Run, more: dict[str, Any], message: str
) -> None:
    model = gan()
    with pytest.raises(FitError, match=message):
        run.fit(model, **given(model, **more))


def test_one_optimizer_needs_a_loss(run: Run) -> None:
    with pytest.raises(FitError, match=r"fit has no loss\n"):
        run.fit(loss=None)


@pytest.mark.long
def test_a_checkpoint_of_other_optimizers_is_refused(run: Run) -> None:
    model = gan()
    run.fit(model, **given(model))
    model = gan()
    swapped = {"critic": adams(model)["D"], "G": adams(model)["G"]}
    with pytest.raises(CheckpointError, match=r"has the optimizers D, G, and fit was given critic"):
        run.fit(model, **given(model, optimizer=swapped))


# --- two ranks -----------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two nets, one of which has a layer that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 3)
        self.spare = nn.Linear(2, 2)


def alternating(model: Any, batch: Any, optimizers: Any) -> dict[str, torch.Tensor]:
    """Two forward passes of one net before a backward pass, and a rank without some gradients."""
    inputs, targets = batch
    features = model.first(inputs)
    loss = nn.functional.cross_entropy(model.second(features.detach()), targets)
    loss = loss + nn.functional.mse_loss(model.second(features.detach() * 2), features.detach())
    optimizers["second"].zero_grad()
    optimizers["second"].backward(loss)
    optimizers["second"].step()
    cross = nn.functional.cross_entropy(model.second(features), targets)
    optimizers["first"].zero_grad()
    optimizers["first"].backward(cross)
    optimizers["first"].step()
    return {"second": loss, "first": cross}


def on_ranks(config: Any, ctx: Any) -> Any:
    model = Pair()
    if ctx.rank:  # as DDP does, all ranks start with rank 0's weights
        model.first.reset_parameters()

    def killed(model: Any, batch: Any, optimizers: Any) -> Any:
        marker = ctx.paths.folder / "killed"
        if config.data.kill and optimizers["first"].steps == 5 and not marker.exists():
            while not any(ctx.paths.checkpoints.glob("step-*4")):
                pass
            if ctx.is_main:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return alternating(model, batch, optimizers)

    optimizers = {
        "first": Adam(model.first.parameters(), 0.01),
        "second": SGD([*model.second.parameters(), *model.spare.parameters()], 0.1, momentum=0.9),
    }
    values = nb.fit(ctx, config, model, samples(37), None, step=killed, optimizer=optimizers)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return values, weights


def launched(folder: Path, ranks: int, *, kill: bool = False, resume: str = "auto") -> Any:
    more = {
        "runtime.output_dir": str(folder),
        "data.kill": kill,
        "checkpoint.every_steps": 2,
        "train.max_grad_norm": 1.0,
        "optim.weight_decay": 0.1,
    }
    config = configured(overrides=more)
    return nb.launch(on_ranks, config, processes=ranks, display="off", resume=resume).values


@pytest.mark.long
def test_two_ranks_train_as_one_and_stay_equal(tmp_path: Path) -> None:
    [(values, weights)] = launched(tmp_path, 1, resume="never")
    two = launched(tmp_path, 2, resume="never")
    for found, of_rank in two:
        assert found == pytest.approx(values, abs=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(of_rank[name], value, atol=1e-5, rtol=0)
    assert {*values} >= {"train_first", "train_second", "train_loss"}
    for name in weights:
        assert torch.equal(two[0][1][name], two[1][1][name])
    assert torch.equal(weights["spare.weight"], Pair().spare.weight)


@pytest.mark.long
def test_two_ranks_resume_after_a_kill(tmp_path: Path) -> None:
    whole = launched(tmp_path, 2, resume="never")
    with pytest.raises(WorkerDied):
        launched(tmp_path, 2, kill=True)
    resumed = launched(tmp_path, 2, kill=True)
    assert resumed[0][0] == whole[0][0]
    for name, value in whole[0][1].items():
        assert torch.equal(resumed[0][1][name], value)
