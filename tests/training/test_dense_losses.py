"""One class per pixel or token, and models that return their loss: as whole batches on one rank."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import TensorDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.training.samples import permutation
from nbtoolkit.worker.context import RunContext

SIZE, BATCH = 28, 8  # the last step has 4 samples
SETTINGS = {
    "optim": {"name": "sgd", "lr": 0.2, "momentum": 0.0, "weight_decay": 0.0, "warmup_ratio": 0.0},
    "train": {"epochs": 2, "batch_size": BATCH},
    "checkpoint": {"enabled": False, "weights": "last"},
    "tracking": {"mlflow": False},
}
CONSTANT = {"optim.schedule": "constant"}


class Segmenter(nn.Module):
    """A U-Net of one level: scores of shape (n, 3, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.inside = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(10, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        deep = torch.relu(self.inside(torch.relu(self.down(images))))
        scores: Tensor = self.head(torch.cat([images, torch.relu(self.up(deep))], dim=1))
        return scores


class Tagger(nn.Module):
    """Scores of shape (n, 5, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(self.embed(tokens))[0])
        return scores.transpose(1, 2)


class Texts:
    """A data set as of Hugging Face: dicts; the labels of most texts are ignored in part."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        place = torch.arange(len(tokens))
        return {"input_ids": tokens, "labels": tokens.where(place >= index % 9, -100)}


def language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts))


def pair(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(batch[0]), batch[1]


def own_loss(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(**batch).loss, None


def returned(loss: Tensor, _: None) -> Tensor:
    return loss


def images_and_masks() -> TensorDataset:
    images = torch.randn(SIZE, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, (images[:, 0] > 0).long() + (images[:, 1] > 1).long())


def tokens() -> Tensor:
    return torch.randint(20, (SIZE, 8), generator=torch.Generator().manual_seed(0))


def late() -> TensorDataset:
    """In the first step of an epoch no target is ignored; in the last all of some samples."""
    text = tokens()
    tags = text % 5
    tags[permutation(SIZE, seed=0, epoch=1)[-3:]] = -100
    return TensorDataset(text, tags)


class Indexed:
    """A data set whose targets nobody knows before they are loaded."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.data[index]


# name: model, data, step, loss
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any, Any]] = {
    "pixels": (Segmenter, images_and_masks, None, F.cross_entropy),
    "tensors of tokens": (Tagger, lambda: (tokens(), tokens() % 5), None, F.cross_entropy),
    "pixels, weights": (
        Segmenter,
        images_and_masks,
        None,
        nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.5]), label_smoothing=0.1),
    ),
    "tokens ignored later": (Tagger, late, None, F.cross_entropy),
    "the same, unknown": (Tagger, lambda: Indexed(late()), None, F.cross_entropy),
    "a language model": (language_model, lambda: Texts(tokens()), own_loss, returned),
    "pixels, two terms": (
        Segmenter,
        images_and_masks,
        None,
        lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean(),
    ),
}


NAMES = list(CASES)
if find_spec("transformers") is None:  # the environments of tests/pythons, as users have them
    del CASES["a language model"]


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def fitted(config: Config, ctx: RunContext) -> dict[str, tuple[dict[str, float], Tensor]]:
    found = {}
    for name, (make, data, step, loss) in CASES.items():
        model = seeded(make)
        more: dict[str, Any] = {} if step is None else {"step": step}
        values = nb.fit(ctx, config, model, data(), data(), loss=loss, **more)
        found[name] = values, vector(model)
    return found


def in_plain_torch(name: str) -> tuple[float, Tensor]:
    """The validation loss and the weights of a loop over whole batches on one device."""
    make, data, step, loss = CASES[name]
    model, step, given = seeded(make), step or pair, data()
    given = TensorDataset(*given) if isinstance(given, tuple) else given
    samples = torch.utils.data.default_collate([given[index] for index in range(SIZE)])

    def chosen(rows: Tensor) -> Any:
        if isinstance(samples, dict):
            return {key: column[rows] for key, column in samples.items()}
        return [column[rows] for column in samples]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in (1, 2):
        for rows in permutation(SIZE, seed=0, epoch=epoch).split(BATCH):
            optimizer.zero_grad()
            loss(*step(model, chosen(rows))).backward()
            optimizer.step()
    with torch.no_grad():
        value = float(loss(*step(model, samples)))
    return value, vector(model)


@pytest.fixture(
    scope="module",
    params=[
        (1, 1),
        (2, 2),
        *(pytest.param(one, marks=pytest.mark.long) for one in [(1, 2), (2, 1)]),
    ],
    ids=str,
)
def launched(request: Any, tmp_path_factory: pytest.TempPathFactory) -> nb.RunResult:
    ranks, passes = request.param
    folder = str(tmp_path_factory.mktemp("dense"))
    config = Config.model_validate(SETTINGS).with_overrides(
        {**CONSTANT, "train.gradient_accumulation_steps": passes, "runtime.output_dir": folder}
    )
    return nb.launch(fitted, config, processes=ranks, display="off")


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_losses_are_those_of_whole_batches(launched: nb.RunResult, name: str) -> None:
    if name not in CASES:
        pytest.skip("transformers is not installed: pip install transformers")
    values, weights = launched.value[name]
    expected_loss, expected = in_plain_torch(name)
    assert (weights - expected).abs().max() < 2e-6
    assert values["val_loss"] == pytest.approx(expected_loss, abs=2e-6)


# --- what is recorded -----------------------------------------------------------------------------


class Watched(nn.Module):
    """Notes how many function modes are active in its forward passes while it trains."""

    def __init__(self, loss_inside: bool) -> None:
        super().__init__()
        self.layer, self.loss_inside = nn.Linear(4, 3), loss_inside
        self.modes: list[int] = []

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.training:
            self.modes.append(len(_get_current_function_mode_stack()))
        scores: Tensor = self.layer(batch[0])
        return F.cross_entropy(scores, batch[1]) if self.loss_inside else scores


@pytest.mark.parametrize(
    ("passes", "inside", "in_forward", "in_loss"),
    [
        (1, False, [0, 0, 0, 0], [0, 0, 0, 0]),
        (1, True, [0, 0, 0, 0], [0, 0, 0, 0]),
        (2, False, [1, 0, 0, 0], [1, 1, 1, 1]),
        (2, True, [1, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_losses_are_recorded_only_where_a_step_has_parts_and_around_the_loss(
    tmp_path: Path, passes: int, inside: bool, in_forward: list[int], in_loss: list[int]
) -> None:
    model, active = Watched(inside), []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if model.training and torch.is_grad_enabled():
            active.append(len(_get_current_function_mode_stack()))
        return outputs if inside else F.cross_entropy(outputs, targets)

    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        data = Indexed(TensorDataset(torch.randn(16, 4), torch.randint(3, (16,))))
        step = lambda model, batch: (model(batch), batch[1])  # noqa: E731
        return nb.fit(ctx, config, model, data, data, loss=loss, step=step)

    config = Config.model_validate(SETTINGS).with_overrides(
        {
            "train.gradient_accumulation_steps": passes,
            "train.max_steps": 4 // passes,
            "runtime.output_dir": str(tmp_path),
        }
    )
    nb.launch(train, config, start="inline", display="off")
    assert model.modes == in_forward
    assert active == in_loss
