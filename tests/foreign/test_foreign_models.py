"""Segmentation, language model and GAN of others: equal on one and two processes, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign_data import FIT, Rows, Value, equal_on_two, images, launched, numbers_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.worker.context import RunContext

# --- 5. pytorch/vision, references/segmentation/train.py, 058f331 (and its utils.py)


class Segmenter(nn.Module):
    """Backbone, classifier, auxiliary classifier; torchvision's FCN without its batch norms."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.deeper = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.classifier = nn.Sequential(
            nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, classes, 1)
        )
        self.aux_classifier = nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features, size = self.backbone(x), x.shape[-2:]
        out, aux = self.classifier(self.deeper(features)), self.aux_classifier(features)
        scores = {"out": out, "aux": aux}
        return {
            name: F.interpolate(one, size=size, mode="bilinear", align_corners=False)
            for name, one in scores.items()
        }


def masks(size: int, seed: int = 0) -> Rows:
    """Pictures with a class for each pixel, by its colour; 255 at borders, more on some."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 12, 12, generator=generator)
    y = F.avg_pool2d(x, 3, 1, 1).argmax(dim=1)
    for picture, border in enumerate(torch.randint(0, 5, (size,), generator=generator).tolist()):
        y[picture, :border], y[picture, :, :border] = 255, 255
    return Rows(x, y)


def with_aux(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    losses = {name: F.cross_entropy(one, target, ignore_index=255) for name, one in outputs.items()}
    return losses["out"] + 0.5 * losses["aux"]


def confusion(model: Any, loader: Any, classes: int = 3) -> Tensor:
    """The matrix of the script's ``evaluate``, added up as its utils.py does."""
    model.eval()
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    with torch.no_grad():
        for image, target in loader:
            right, found = target.flatten(), model(image)["out"].argmax(1).flatten()
            counted = (right >= 0) & (right < classes)
            pairs = classes * right[counted] + found[counted]
            matrix += torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    if dist.is_initialized():
        dist.barrier()
        dist.all_reduce(matrix)
    return matrix


def with_aux_over_ranks(ctx: RunContext, outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The same, as the sentence of the warning says."""
    weight = ctx.accelerator.reduce((target != 255).sum())
    sums = {
        name: F.cross_entropy(one, target, ignore_index=255, reduction="sum")
        for name, one in outputs.items()
    }
    total: Tensor = (sums["out"] + 0.5 * sums["aux"]) * ctx.world_size / weight
    return total


def segmentation(config: Config, ctx: RunContext, *, remedy: bool = False) -> Value:
    criterion = partial(with_aux_over_ranks, ctx) if remedy else with_aux  # nbtoolkit (partial)
    torch.manual_seed(0)
    data, test, model, rate = masks(19), masks(11, 1), Segmenter(3), 0.1
    start = numbers_of(model)
    # The script's samplers of one process (ctx.prepare divides their batches).
    sampler = torch.utils.data.RandomSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    sampler_of_test = torch.utils.data.SequentialSampler(test)
    loader_of_test = DataLoader(test, batch_size=4, sampler=sampler_of_test)
    groups = [
        {"params": [*model.backbone.parameters(), *model.deeper.parameters()]},
        {"params": list(model.classifier.parameters())},
        {"params": list(model.aux_classifier.parameters()), "lr": rate * 10},
    ]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, weight_decay=1e-4)
    steps = len(loader) * 2
    poly = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda x: (1 - x / steps) ** 0.9)
    prepared = ctx.prepare(model, optimizer, loader, loader_of_test, poly)  # nbtoolkit
    model, optimizer, loader, loader_of_test, poly = prepared
    results = []
    for _ in range(2):
        model.train()
        for image, target in loader:
            loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            poly.step()
        results.append(confusion(model, loader_of_test))
    rates = poly.get_last_lr()
    return {
        "counted": int((test.columns[1] != 255).sum()),
        "start": start,
        "weights": numbers_of(model),
        "results": [*results, rates],
        "read": data.read,
    }


segmentation_with_sums = partial(segmentation, remedy=True)


def segmentation_in_fit(config: Config, ctx: RunContext) -> Value:
    torch.manual_seed(0)
    model = Segmenter(3)
    start = numbers_of(model)
    values = nb.fit(ctx, config, model, masks(19), masks(11, 1), loss=with_aux)
    matrix = confusion(model, ctx.prepare(DataLoader(masks(11, 1), batch_size=4)))
    return {"start": start, "weights": numbers_of(model), "results": [values, matrix]}


@pytest.mark.long
def test_segmentation(tmp_path: Path) -> None:
    exact = equal_on_two(segmentation_with_sums, tmp_path, batch=4)
    (plain,) = launched(segmentation, tmp_path, 1)
    assert (plain["weights"] - exact["weights"]).abs().max() < 1e-5
    # Each pixel of each picture that counts is counted once, in an uneven last batch, too.
    assert exact["results"][-2].sum() == exact["counted"]


@pytest.mark.long
def test_segmentation_in_fit(tmp_path: Path) -> None:
    values, matrix = equal_on_two(
        segmentation_in_fit,
        tmp_path,
        **{**FIT, "train__epochs": 10, "train__batch_size": 4, "optim__lr": 0.01},
    )["results"]
    assert values["val_loss"] < 1.6  # guesses have 1.5 x log(3) = 1.648
    assert matrix.diagonal().sum() > matrix.sum() / 3


# --- 6. pytorch/examples, word_language_model/main.py and model.py, 77f55b9
# Columns of a text, whose hidden state goes on from step to step; no optimizer.


class Words(nn.Module):
    """Embedding, LSTM, one layer; without the dropout."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.encoder, self.size = nn.Embedding(words, size), size
        self.rnn, self.decoder = nn.LSTM(size, size, 2), nn.Linear(size, words)

    def forward(self, text: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(text), hidden)
        return F.log_softmax(self.decoder(output).flatten(0, 1), dim=1), hidden

    def init_hidden(self, columns: int) -> tuple[Tensor, Tensor]:
        zeros = self.decoder.weight.new_zeros(2, columns, self.size)
        return zeros, zeros.clone()


def text_in_columns(length: int, columns: int, seed: int) -> Tensor:
    """A text of 12 words that follow one another in steps of one to three."""
    steps = torch.randint(1, 4, (length,), generator=torch.Generator().manual_seed(seed))
    text = steps.cumsum(0) % 12
    rows = length // columns
    return text[: rows * columns].view(columns, rows).t().contiguous()


def chunk(source: Tensor, row: int, longest: int) -> tuple[Tensor, Tensor]:
    rows = min(longest, len(source) - 1 - row)
    return source[row : row + rows], source[row + 1 : row + 1 + rows].flatten()


def language_model(config: Config, ctx: RunContext) -> Value:
    torch.manual_seed(0)
    train_data, val_data = text_in_columns(900, 4, 0), text_in_columns(90, 4, 1)
    # A column is a sequence of its own: each rank takes some of them.
    train_data = train_data.chunk(ctx.world_size, dim=1)[ctx.rank]  # nbtoolkit
    val_data = val_data.chunk(ctx.world_size, dim=1)[ctx.rank]  # nbtoolkit
    model: Any = Words(12, 16)
    start, criterion, rate, results, best = numbers_of(model), nn.NLLLoss(), 8.0, [], None
    plain, model = model, ctx.prepare(model)  # nbtoolkit
    for _ in range(3):
        model.train()
        hidden = plain.init_hidden(train_data.shape[1])  # nbtoolkit (plain)
        for row in range(0, len(train_data) - 1, 8):
            data, targets = chunk(train_data, row, 8)
            model.zero_grad()
            hidden = tuple(one.detach() for one in hidden)
            output, hidden = model(data, hidden)
            criterion(output, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-rate)
        model.eval()
        total, hidden = 0.0, plain.init_hidden(val_data.shape[1])  # nbtoolkit (plain)
        with torch.no_grad():
            for row in range(0, len(val_data) - 1, 8):
                data, targets = chunk(val_data, row, 8)
                output, hidden = model(data, hidden)
                total += len(data) * criterion(output, targets).item()
        loss = torch.tensor(total / (len(val_data) - 1))
        loss = ctx.accelerator.reduce(loss, "mean").item()  # nbtoolkit
        results.append(loss)
        if best is None or loss < best:
            best = loss
        else:
            rate /= 4
    return {"start": start, "weights": numbers_of(plain), "results": [*results, rate]}


@pytest.mark.long
def test_language_model(tmp_path: Path) -> None:
    first, *_, last, _ = equal_on_two(language_model, tmp_path)["results"]
    assert last < first - 0.01


# --- 7. https://docs.pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html
# (pytorch/examples, dcgan/main.py, 77f55b9); pictures of 8 pixels, no batch norms.


def gan(config: Config, ctx: RunContext) -> Value:
    torch.manual_seed(0)
    data = Rows(images(16, channels=3).columns[0].tanh())
    dataloader = DataLoader(data, batch_size=8, shuffle=True)
    maker: Any = nn.Sequential(
        nn.ConvTranspose2d(6, 8, 2, 1, 0, bias=False),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 8, 4, 2, 1, bias=False),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    judge: Any = nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),  # one number a sample
    )
    start, criterion = numbers_of(nn.ModuleList([maker, judge])), nn.BCELoss()
    adam_of_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
    adam_of_maker = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
    prepared = ctx.prepare(maker, judge, adam_of_maker, adam_of_judge, dataloader)  # nbtoolkit
    maker, judge, adam_of_maker, adam_of_judge, dataloader = prepared
    common = torch.Generator().manual_seed(1)  # nbtoolkit: the ranks draw from it alike
    results = []
    for _ in range(3):
        for (real,) in dataloader:
            # The judge, on pictures that are real and on some that are not.
            judge.zero_grad()
            size = len(real)
            label = torch.full((size,), 1.0)
            error_of_real = criterion(judge(real), label)
            error_of_real.backward()
            count = size * ctx.world_size  # nbtoolkit
            noise = torch.randn(count, 6, 1, 1, generator=common)  # nbtoolkit
            noise = noise.chunk(ctx.world_size)[ctx.rank]  # nbtoolkit
            fake = maker(noise)
            label.fill_(0.0)
            error_of_fake = criterion(judge(fake.detach()), label)
            error_of_fake.backward()
            adam_of_judge.step()
            # The maker, by what the judge takes for real now.
            maker.zero_grad()
            label.fill_(1.0)
            error_of_maker = criterion(judge(fake), label)
            error_of_maker.backward()
            adam_of_maker.step()
        errors = torch.stack([error_of_real, error_of_fake, error_of_maker]).detach()
        results.append(ctx.accelerator.reduce(errors, "mean"))  # nbtoolkit
    both = nn.ModuleList([ctx.unwrap(maker), ctx.unwrap(judge)])
    return {"start": start, "weights": numbers_of(both), "results": results, "read": data.read}


@pytest.mark.long
def test_gan(tmp_path: Path) -> None:
    first, *_, last = equal_on_two(gan, tmp_path, batch=8)["results"]
    assert (first - last).abs().min() > 1e-4
