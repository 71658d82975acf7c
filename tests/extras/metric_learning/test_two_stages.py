"""The two-stage task in real processes: scores, ranks, kills, foreign files, searches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feeds import contexts
from PIL import Image

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import CheckpointError, ConfigError, FitError, MissingExtra, WorkerDied
from nbtoolkit.extras import metric_learning
from nbtoolkit.extras.metric_learning import images, load_encoder
from nbtoolkit.extras.metric_learning.encoders import (
    Augment,
    EncoderSpec,
    make_encoder,
    make_named,
    make_transforms,
)
from nbtoolkit.extras.metric_learning.images import Images, decode, split
from nbtoolkit.extras.metric_learning.retrieval import retrieval_scores
from nbtoolkit.extras.metric_learning.two_stages import split_images, stage_config, stages_of

ROOT = Path(__file__).resolve().parents[3]


def config_of(folder: Path, *, epochs: tuple[int, int] = (1, 1), **overrides: Any) -> Config:
    """The shipped configuration; ``model__loss=...`` overrides ``model.loss``."""
    more = {name.replace("__", "."): value for name, value in overrides.items()}
    stages = {f"model.stage{n}.train.epochs": count for n, count in enumerate(epochs, start=1)}
    own = {"runtime.output_dir": str(folder), "tracking.mlflow": False}
    file = ROOT / "config/metric_learning.yaml"
    return nb.load_config(file, env="local", overrides={**own, **stages, **more})


def trained(config: Config, *, processes: int = 1, resume: str = "never") -> Any:
    return nb.launch(
        metric_learning.train, config, processes=processes, display="off", resume=resume
    )


def test_both_stages_on_two_ranks(tmp_path: Path) -> None:
    result = trained(config_of(tmp_path, epochs=(4, 3)), processes=2)
    value = result.value
    assert value["val_accuracy"] > 0.9
    assert value["val_map"] > 0.6
    right = np.equal(value["labels"], value["predictions"])
    assert right.mean() == pytest.approx(value["val_accuracy"])
    assert result.metrics["val_accuracy"] == value["val_accuracy"]

    images = metric_learning.load_images(config_of(tmp_path))
    model = load_encoder(result.paths.folder)
    assert model.classes == tuple("0123456789")
    with torch.no_grad():
        scores = model.classifier(model.encoder(images.items))
    assert (scores.argmax(dim=1) == images.labels).double().mean() > 0.9


@pytest.mark.long
def test_the_shipped_configuration_is_as_good_as_direct_classification(tmp_path: Path) -> None:
    """With one seed; with three, and a limit of 0.005: tests/bench/metric_learning.py."""
    both = config_of(tmp_path, epochs=(20, 10))
    value = trained(both, processes=2).value
    assert value["val_accuracy"] >= 0.97
    assert value["val_precision_at_1"] >= 0.97
    settings = {"stages": [2], "stage2.train.epochs": 30, "stage2.optim.lr": 3e-3}
    direct = both.with_overrides({f"model.{name}": value for name, value in settings.items()})
    assert value["val_accuracy"] >= trained(direct, processes=2).value["val_accuracy"] - 0.01


@pytest.mark.long
def test_metrics_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    # At the rates that train fast, a step multiplies differences of rounding by up to ten: after
    # two epochs of stage 1, weights of 1 and of 2 ranks differ by 1e-8 at 2e-4, by 1e-4 at 2e-3. On
    # some CPUs, one of 180 validation images then has another neighbour: 0.0056 of a score.
    config = config_of(tmp_path, epochs=(2, 2), model__finetune=True, optim__name="sgd")
    slow = {"model.stage1.optim.lr": 5e-4, "model.stage2.optim.lr": 2e-3}
    config = config.with_overrides({"optim.momentum": 0.9, **slow})
    one, two = (trained(config, processes=ranks).value for ranks in (1, 2))
    names = [name for name, value in one.items() if isinstance(value, float)]
    assert {"val_map", "val_knn", "val_projected_map", "val_loss", "val_accuracy"} <= set(names)
    assert {name: two[name] for name in names} == pytest.approx(
        {name: one[name] for name in names}, abs=0.012
    )


@pytest.mark.long
@pytest.mark.parametrize(("stage", "after"), [(1, "step-*"), (2, "fit-2/step-*")])
def test_a_killed_stage_resumes(tmp_path: Path, stage: int, after: str) -> None:
    marker = tmp_path / "killed"
    folder = tmp_path / "runs"
    step = {"name": "metric_functions.KillOnce", "folder": str(folder), "after": after}
    given = {"data.augment": [{**step, "marker": str(marker)}], "checkpoint.every_steps": 4}
    config = config_of(folder, epochs=(2, 2)).with_overrides(given)
    with pytest.raises(WorkerDied):
        trained(config, processes=2)
    assert marker.exists()
    resumed = trained(config, processes=2, resume="auto")
    log = (resumed.paths.folder / "ranks/0/log.txt").read_text()
    assert log.count("fit: resumes after epoch") == stage
    if stage == 2:
        assert "resumes after epoch 2\n" in log  # of stage 1: nothing of it is repeated
    whole = trained(config, processes=2)  # the marker exists: no kill
    assert {k: v for k, v in whole.value.items() if "_" in k} == {
        k: v for k, v in resumed.value.items() if "_" in k
    }
    one, two = (torch.load(run.paths.folder / "encoder.pt") for run in (whole, resumed))
    for part in ("encoder", "classifier"):
        for name, tensor in one[part].items():
            assert torch.equal(tensor, two[part][name]), name


@pytest.mark.long
def test_stage_2_alone_takes_the_encoder_of_another_run(tmp_path: Path) -> None:
    stage_1 = trained(config_of(tmp_path, epochs=(1, 1), model__stages=[1]))
    assert "val_accuracy" not in stage_1.value
    assert load_encoder(stage_1.paths.folder).classifier is None
    # The encoder alone, embedded in the kernel, has the scores of the validation with the head.
    digits = metric_learning.load_images(config_of(tmp_path))
    valid = digits.subset(split(digits.labels)[1])
    vectors = metric_learning.embed(load_encoder(stage_1.paths.folder), valid)
    scores = retrieval_scores(torch.from_numpy(vectors), valid.labels)
    assert {name: stage_1.value[f"val_{name}"] for name in scores} == pytest.approx(
        scores, abs=1e-4
    )
    config = config_of(tmp_path, model__checkpoint=str(stage_1.paths.folder))
    stage_2 = trained(config)
    assert "val_map" not in stage_2.value
    before, after = (load_encoder(run.paths.folder).encoder for run in (stage_1, stage_2))
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name])  # frozen

    other = config.with_overrides({"model.embedding_size": 64})
    with pytest.raises(CheckpointError, match=r"does not fit this Sequential: .*128.*64"):
        trained(other)
    torch.save({"model": {"weight": torch.zeros(2)}}, tmp_path / "foreign.pt")
    foreign = config.with_overrides({"model.checkpoint": str(tmp_path / "foreign.pt")})
    with pytest.raises(CheckpointError, match=r"foreign\.pt is no encoder of metric_learning"):
        trained(foreign)


@pytest.mark.long
@pytest.mark.parametrize("average", ["ema", "swa"])
def test_stage_2_ends_with_the_average_of_its_weights(tmp_path: Path, average: str) -> None:
    given = {"ema_decay": 0.9, "swa_start": 0.5, "swa_lr": 3e-3}
    settings = {f"model__stage2__train__{name}": value for name, value in given.items()}
    plain = config_of(tmp_path, epochs=(2, 4), model__finetune=True, **settings)
    averaged = plain.with_overrides({"model.stage2.train.weight_averaging": average})
    results = [trained(config, processes=2) for config in (plain, averaged)]
    one, two = (load_encoder(result.paths.folder) for result in results)
    before, after = one.classifier.state_dict(), two.classifier.state_dict()
    assert not torch.allclose(before["2.weight"], after["2.weight"], atol=1e-3)

    # The averaged weights were validated, are in the file, and predict the same in the kernel.
    value, digits = results[1].value, metric_learning.load_images(plain)
    valid = digits.subset(split(digits.labels)[1])
    with torch.no_grad():
        predicted = two.classifier(two.encoder(valid.items)).argmax(dim=1)
    assert predicted.tolist() == value["predictions"]
    right = (predicted == valid.labels).double().mean()
    assert right.item() == pytest.approx(value["val_accuracy"])
    assert value["val_accuracy"] >= 0.8  # after six epochs


# --- images of files ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of ten grey images, in the groups a to e of two images."""
    pixels = np.random.default_rng(0).integers(0, 100, (3, 10, 8, 8), dtype=np.uint8)
    for number, name in enumerate(("ant", "bee", "moth")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for index in range(10):
            shown = pixels[number, index] + number * 50
            Image.fromarray(shown).save(tmp_path / f"set/{name}/{'abcde'[index // 2]}-{index}.png")
    return tmp_path / "set"


def of_folder(tmp_path: Path, folder: Path, **overrides: Any) -> Config:
    own = {"data__folder": str(folder), "data__size": 8, "data__channels": 1}
    small = {"train__batch_size": 12, "model__embedding_size": 16}
    return config_of(tmp_path / "runs", **{**own, **small, **overrides})


@pytest.mark.long
def test_a_folder_of_images_with_groups_and_workers(tmp_path: Path, folder: Path) -> None:
    more = {"data__group_pattern": "/(.)-", "train__num_workers": 1, "data__size": 12}
    result = trained(of_folder(tmp_path, folder, **more, epochs=(1, 1)))
    assert result.value["classes"] == ["ant", "bee", "moth"]
    assert sorted(result.value["labels"]) == [0, 0, 1, 1, 2, 2]
    assert load_encoder(result.paths.folder).spec.size == (12, 12)


@pytest.mark.long
def test_a_damaged_image_is_refused_or_skipped(tmp_path: Path, folder: Path) -> None:
    (folder / "bee" / "b-3.png").write_text("no image")
    with pytest.raises(FitError, match=r"1 of 30 images are damaged: .*b-3\.png cannot be decoded"):
        trained(of_folder(tmp_path, folder))
    result = trained(of_folder(tmp_path, folder, data__skip_damaged=True))
    assert len(result.value["labels"]) in (5, 6)
    assert "left out: 1 of 30" in (result.paths.folder / "events.jsonl").read_text()


def test_files_are_decoded_once_until_one_changes(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []

    def counting(path: str, size: tuple[int, int] | None, channels: int) -> torch.Tensor:
        decoded.append(path)
        return decode(path, size, channels)

    monkeypatch.setattr(images, "decode", counting)
    file = folder / "bee" / "b-3.png"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    config = of_folder(tmp_path, folder, data__skip_damaged=True)
    (ctx,) = contexts(tmp_path / "run", runtime__output_dir=str(tmp_path))
    for expected in (30, 0):
        decoded.clear()
        parts = split_images(metric_learning.load_images(config), config, ctx)
        assert sum(map(len, parts)) == 29
        assert str(file) not in [*parts[0].items, *parts[1].items]
        assert len(decoded) == expected
    file.write_bytes(whole)
    parts = split_images(metric_learning.load_images(config), config, ctx)
    assert sum(map(len, parts)) == len(decoded) == 30


@pytest.mark.long
def test_a_class_that_stage_2_does_not_train_is_named(tmp_path: Path, folder: Path) -> None:
    rows = [
        f"{path},{path.parent.name},{path.parent.name if path.parent.name == 'moth' else path.stem}"
        for path in sorted(folder.glob("*/*.png"))
    ]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["path,label,group", *rows]))
    own = {"data.table": str(table), "data.size": 8, "data.channels": 1, "data.valid_share": 0.34}
    config = config_of(tmp_path / "runs", train__batch_size=12).with_overrides(own)
    images = metric_learning.load_images(config)

    def holds_moths_out(seed: int) -> bool:
        _, valid = split(images.labels, images.groups, valid_share=0.34, seed=seed)
        return 2 in images.labels[valid].tolist()

    seed = next(filter(holds_moths_out, range(20)))
    config = config.with_overrides({"data.split_seed": seed})
    with pytest.raises(FitError, match=r"validate on 1 classes .* not train: moth\n"):
        trained(config)
    value = trained(config.with_overrides({"model.stages": [1]})).value
    assert 0 < value["val_map"] <= 1  # of the unseen class, too


@pytest.mark.long
def test_three_hundred_classes(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (300, 8, 8), dtype=np.uint8)
    for number in range(1200):
        path = tmp_path / f"set/{number % 300:03}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number % 300]).save(path)
    more = {"data__valid_share": 0.5, "data__augment": None, "train__batch_size": 64}
    more |= {"model__samples_per_class": 2, "model__embedding_size": 64}
    result = trained(of_folder(tmp_path, tmp_path / "set", epochs=(3, 6), **more))
    assert sorted(result.value["labels"]) == sorted([*range(300), *range(300)])
    right = np.equal(result.value["labels"], result.value["predictions"])
    beyond = np.array(result.value["labels"]) > 255  # which uint8 would confuse with others
    assert right.mean() > 0.3
    assert right[beyond].mean() > 0.3


# --- searches ---


@pytest.mark.long
def test_a_sweep_and_folds_take_the_whole_function(tmp_path: Path) -> None:
    loss = {"name": "SupConLoss", "temperature": 0.1}
    config = config_of(tmp_path, epochs=(1, 1), train__batch_size=256, model__loss=loss)
    space = {
        "model.loss.temperature": {"type": "float", "low": 0.05, "high": 0.5},
        "model.stage1.optim.lr": {"type": "float", "low": 1e-3, "high": 1e-2, "log": True},
    }
    search = {"study": {"metric": "val_accuracy", "sampler": "random"}, "space": space}
    study = nb.sweep(metric_learning.train, config, search, n_trials=2, display="off")
    assert study.best_value > 0.2
    labels = metric_learning.load_images(config).labels
    folds = nb.make_folds(labels, k=3)
    cv = nb.cross_validate(metric_learning.train, config, folds, display="off")
    assert cv.status == "completed"
    assert (cv.scores["val_accuracy"] > 0.2).all()


# --- settings ---


def test_a_stage_cannot_change_what_the_plan_has_decided(tmp_path: Path) -> None:
    config = Config().with_overrides({"model.stage1": {"train": {"batch_size": 8}}})
    with pytest.raises(ConfigError, match=r"model\.stage1 sets train\.batch_size\n"):
        stage_config(config, 1)
    config = Config().with_overrides({"model.stage2": {"runtime": {"output_dir": "x"}}})
    with pytest.raises(ConfigError, match=r"model\.stage2 sets runtime\n"):
        stage_config(config, 2)
    (ctx,) = contexts(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.stage2 sets runtime\n"):
        metric_learning.train(config, ctx)  # before stage 1


def test_stages_have_their_own_settings() -> None:
    given = {"train.weight_averaging": "ema", "checkpoint.monitor": "val_accuracy"}
    given |= {"model.stage1.optim.lr": 0.5, "model.stage2.train.ema_decay": 0.9}
    one, two = (stage_config(Config().with_overrides(given), stage) for stage in (1, 2))
    assert (one.optim.lr, one.checkpoint.monitor) == (0.5, "val_map")
    assert one.train.weight_averaging == "none"
    assert (two.train.ema_decay, two.train.weight_averaging) == (0.9, "ema")
    assert two.checkpoint.monitor == "val_accuracy"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"turn": 5}, "unexpected keyword argument 'turn'"),
        (
            [{"name": "metric_functions.Nothing"}],
            "data.augment: metric_functions.Nothing with {} cannot be made",
        ),
        ([{"name": "metric_functions.Add"}], "missing 1 required positional argument: 'value'"),
    ],
)
def test_a_wrong_augmentation_is_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_transforms(given)


def test_augmentation() -> None:
    image = torch.rand(3, 10, 8)
    assert torch.allclose(Augment()(image), image, atol=1e-6)
    changed = Augment(rotate=10, shift=0.1, scale=0.1)(image)
    assert changed.shape == image.shape
    assert not torch.equal(changed, image)
    zoomed = [Augment(scale=0.5)(torch.ones(1, 9, 9))[0].mean() for _ in range(3)]
    assert zoomed == pytest.approx([1.0] * 3)  # nothing of outside comes in
    assert make_transforms(None) == []
    changes = make_transforms([{"name": "metric_functions.Add", "value": n} for n in (1, 2)])
    twice = Images(image[None], torch.zeros(1), ("a",), transforms=changes)
    assert torch.equal(twice[0][0], image + 1 + 2)


def test_encoders() -> None:
    for size, channels in ((8, 1), (64, 3), (20, 3)):
        encoder = make_encoder(EncoderSpec("cnn", 24, channels, (size, size)))
        assert encoder(torch.rand(2, channels, size, size)).shape == (2, 24)
    with pytest.raises(ConfigError, match=r"model\.encoder is 'resnet18'"):
        make_encoder(EncoderSpec("resnet18"))


def test_without_the_losses_their_install_line_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)  # as if it were not there
    with pytest.raises(MissingExtra, match=r"pytorch-metric-learning, [\s\S]*pip install"):
        stages_of(config)
    assert stages_of(config.with_overrides({"model.stages": [2]})) == (False, True)


@pytest.mark.parametrize(
    ("package", "setting", "value"),
    [
        ("timm", "model.encoder", {"name": "timm.create_model"}),
        ("torchvision", "data.augment", {"name": "torchvision.transforms.v2.GaussianBlur"}),
    ],
)
def test_without_a_package_its_install_line_is_told(
    monkeypatch: pytest.MonkeyPatch, package: str, setting: str, value: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{setting}: {package}.* cannot be made[\s\S]*pip"):
        make_named(setting, value)
