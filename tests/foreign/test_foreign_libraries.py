"""Code for accelerate, timm, transformers, Lightning: equal on 1 and 2 processes, or refused.

timm itself is not installed here: its script's loop is restated, with the functions it calls.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import FIT, Rows, Value, equal_on_two, images, numbers_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.worker.context import RunContext

# --- 8. huggingface/accelerate, examples/complete_cv_example.py, 16cb6eb


class Pets(nn.Module):
    """A convolutional backbone that is frozen, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.backbone(x))  # type: ignore[no-any-return]


def pets(config: Config, ctx: RunContext) -> Value:
    accelerator = ctx.accelerator  # nbtoolkit: instead of Accelerator(...)
    torch.manual_seed(42)
    data = Rows(*images(48, channels=3).columns, names=("image", "label"))
    held_out = Rows(*images(21, 1, channels=3).columns, names=("image", "label"))
    train_loader = DataLoader(data, shuffle=True, batch_size=12)
    eval_loader = DataLoader(held_out, shuffle=False, batch_size=8)
    model: Any = Pets().to(accelerator.device)
    for parameter in model.parameters():
        parameter.requires_grad = False
    for parameter in model.classifier.parameters():
        parameter.requires_grad = True
    mean, std, start = torch.full((1, 3, 1, 1), 0.1), torch.ones(1, 3, 1, 1), numbers_of(model)
    optimizer: Any = torch.optim.Adam(params=model.parameters(), lr=0.03 / 25)
    schedule: Any = OneCycleLR(optimizer, max_lr=0.03, epochs=3, steps_per_epoch=len(train_loader))
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    results = []
    for _ in range(3):
        model.train()
        total = torch.zeros(())
        for batch in train_loader:
            batch = {name: one.to(accelerator.device) for name, one in batch.items()}
            loss = F.cross_entropy(model((batch["image"] - mean) / std), batch["label"])
            total += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right, count = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model((batch["image"] - mean) / std)
            found, labels = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            count += len(labels)
            right += int((found == labels).sum())
        total = accelerator.reduce(total, "mean")  # nbtoolkit
        results.append((count, right / count, total.item(), schedule.get_last_lr()[0]))
    accelerator.end_training()
    weights = numbers_of(accelerator.unwrap_model(model))
    return {"start": start, "weights": weights, "results": results, "read": data.read}


def test_accelerate_example(tmp_path: Path) -> None:
    first, *_, last = equal_on_two(pets, tmp_path, batch=12)["results"]
    assert first[0] == last[0] == 21  # none twice, though 8, 8 and 5 are no even parts
    assert last[2] < first[2]


# --- 9. huggingface/pytorch-image-models, train.py (train_one_epoch), aa4b585, without mixup


class Smoothed(nn.Module):
    """timm's cross-entropy with label smoothing: its own mean, not torch's."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        chances = F.log_softmax(x, dim=-1)
        right = -chances.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
        return (0.9 * right - 0.1 * chances.mean(dim=-1)).mean()


class Mixer(nn.Module):
    """Patches, layer norms, an MLP over patches and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(1, 8, 2, 2), nn.LayerNorm(8)
        self.tokens = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.channels = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2)
        x = x + self.tokens(x)
        x = x + self.channels(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def image_models(config: Config, ctx: RunContext) -> Value:
    torch.manual_seed(42)  # nbtoolkit: the script adds the rank
    data, held_out, steps_of_one = images(56), images(21, 1), 3
    sampler = DistributedSampler(data)
    loader: Any = DataLoader(data, 8 // ctx.world_size, sampler=sampler, drop_last=True)
    loader_of_test: Any = DataLoader(held_out, 8)
    model: Any = Mixer()
    start, criterion = numbers_of(model), Smoothed()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    prepared = ctx.prepare(model, optimizer, loader, loader_of_test)  # nbtoolkit
    model, optimizer, loader, loader_of_test = prepared
    plain, results, orders = ctx.unwrap(model), [], []  # nbtoolkit
    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad()
        count, last, before = steps_of_one, len(loader) - 1, len(data.read)
        rest = len(loader) % steps_of_one
        for number, (x, y) in enumerate(loader):
            update = number == last or (number + 1) % steps_of_one == 0
            if number >= len(loader) - rest:
                count = rest
            apart = hasattr(model, "no_sync") and not update
            with model.no_sync() if apart else nullcontext():
                (criterion(model(x), y) / count).backward()
            if not update:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(plain)
        orders.append(data.read[before:])
        for module in (plain, average.module):
            right, total = 0, 0.0
            module.eval()
            with torch.no_grad():
                for x, y in loader_of_test:
                    scores, y = ctx.accelerator.gather_for_metrics((module(x), y))  # nbtoolkit
                    right += int((scores.argmax(1) == y).sum())
                    total += F.cross_entropy(scores, y, reduction="sum").item()
            results.append((right / 21, total / 21))
    averaged = numbers_of(average.module)
    values = {"start": start, "weights": numbers_of(plain), "results": [*results, averaged]}
    return {**values, "read": data.read, "orders": orders}


@pytest.mark.long
def test_timm_script(tmp_path: Path) -> None:
    value = equal_on_two(image_models, tmp_path, batch=8)
    assert value["orders"][0] != value["orders"][1]  # the sampler's epoch was set
    # The average is another model than the last one.
    assert (value["results"][-1] - value["weights"]).abs().max() > 1e-3


# --- 10. https://huggingface.co/learn/llm-course/chapter3/4, "A full training loop"


def sentences(size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Words, of which the largest one is the sentence's class, of four to nine a sentence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 10, (size,), generator=generator).tolist()
    words = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    return [{"input_ids": one, "labels": int(one.max() > 17)} for one in words]


def padded(batch: list[dict[str, Any]], *, of_words: bool = False) -> dict[str, Tensor]:
    """As DataCollatorWithPadding, or DataCollatorForTokenClassification, pads to the longest."""
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    words = [one["input_ids"] for one in batch]
    labels: Any = torch.tensor([one["labels"] for one in batch])
    if of_words:
        labels = pad([(one > 10).long() for one in words], padding_value=-100)
    mask = pad([torch.ones_like(one) for one in words])
    return {"input_ids": pad(words), "attention_mask": mask, "labels": labels}


def bert(*, of_words: bool = False) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return (BertForTokenClassification if of_words else BertForSequenceClassification)(config)


def course(config: Config, ctx: RunContext) -> Value:
    from transformers import get_scheduler

    torch.manual_seed(0)
    collate = padded
    train_loader = DataLoader(sentences(48), shuffle=True, batch_size=12, collate_fn=collate)
    eval_loader = DataLoader(sentences(21, 1), batch_size=8, collate_fn=collate)
    model = bert()
    start, optimizer = numbers_of(model), torch.optim.AdamW(model.parameters(), lr=5e-3)
    steps = 3 * len(train_loader)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    prepared = ctx.prepare(model, optimizer, train_loader, eval_loader, schedule)  # nbtoolkit
    model, optimizer, train_loader, eval_loader, schedule = prepared
    results = []
    for _ in range(3):
        model.train()
        total = torch.zeros(())
        for batch in train_loader:
            batch = {name: one.to(ctx.device) for name, one in batch.items()}
            outputs = model(**batch)
            outputs.loss.backward()
            total += outputs.loss.detach()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        found, labels = [], []
        for batch in eval_loader:
            with torch.no_grad():
                chances = model(**batch).logits.softmax(-1)
            both = ctx.accelerator.gather_for_metrics((chances, batch["labels"]))  # nbtoolkit
            found.append(both[0])
            labels.append(both[1])
        right = (torch.cat(found).argmax(-1) == torch.cat(labels)).float().mean()
        total = ctx.accelerator.reduce(total, "mean")  # nbtoolkit
        results.append([total, right, torch.cat(found)])
    return {"start": start, "weights": numbers_of(ctx.unwrap(model)), "results": results}


def words_in_fit(config: Config, ctx: RunContext) -> Value:
    torch.manual_seed(0)
    model, collate = bert(of_words=True), partial(padded, of_words=True)
    start = numbers_of(model)
    values = nb.fit(
        ctx,
        config,
        model,
        sentences(53),
        sentences(21, 1),
        step=lambda model, batch: (model(**batch).loss, None),
        loss=lambda loss, _: loss,
        collate=collate,
    )
    return {"start": start, "weights": numbers_of(model), "results": values}


@pytest.mark.long
def test_transformers_loop(tmp_path: Path) -> None:
    first, *_, last = equal_on_two(course, tmp_path)["results"]
    assert last[0] < first[0]


@pytest.mark.long
def test_transformers_loop_over_padded_labels(tmp_path: Path) -> None:
    # Not AdamW: the gradient of a key's bias is zero but for rounding, which Adam makes steps of.
    settings = {**FIT, "train__epochs": 4, "optim__name": "sgd", "optim__lr": 0.5}
    assert equal_on_two(words_in_fit, tmp_path, **settings)["results"]["val_loss"] < 0.69


# --- 11. https://lightning.ai/docs/pytorch/stable/starter/introduction.html
# (Lightning-AI/pytorch-lightning, docs/source-pytorch/starter/introduction.rst, 7f0c343)


def autoencoder(config: Config, ctx: RunContext) -> Value:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    from torchmetrics import MeanMetric

    class LitAutoEncoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))
            self.held_out = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].flatten(1)
            loss = F.mse_loss(self.decoder(self.encoder(x)), x)
            self.log("train_loss", loss, sync_dist=True, on_epoch=True, on_step=False)
            return loss

        # A metric that knows how many samples each rank had; sync_dist=True averages the ranks.
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x = batch[0].flatten(1)
            self.held_out.update(F.mse_loss(self.decoder(self.encoder(x)), x), len(x))
            self.log("val_loss", self.held_out)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module, data = LitAutoEncoder(), images(48)
    start, whole = numbers_of(module), data.columns[0].flatten(1)
    before = F.mse_loss(module.decoder(module.encoder(whole)), whole).item()
    loader, held_out = DataLoader(data, 12, shuffle=True), DataLoader(images(21, 1), 8)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=ctx.world_size,
        strategy=DDPStrategy() if ctx.world_size > 1 else "auto",
        use_distributed_sampler=False,  # nbtoolkit: ctx.prepare divides the batches
        default_root_dir=ctx.paths.checkpoints,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ctx.prepare(loader), ctx.prepare(held_out))  # nbtoolkit
    results = {name: float(value) for name, value in trainer.callback_metrics.items()}
    values = {"start": start, "weights": numbers_of(module), "results": results}
    return {**values, "read": data.read, "before": before}


@pytest.mark.long
def test_lightning_module(tmp_path: Path) -> None:
    value = equal_on_two(autoencoder, tmp_path, batch=12)
    assert set(value["results"]) == {"train_loss", "val_loss"}
    assert value["results"]["train_loss"] < value["before"]
