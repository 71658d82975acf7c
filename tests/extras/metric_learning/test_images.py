"""Images of folders and tables: stable classes, groups on one side, damaged files named."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from feeds import contexts
from PIL import Image

from nbtoolkit.errors import FitError, FoldError
from nbtoolkit.extras.metric_learning.images import Images, decode, from_folder, from_table, split
from nbtoolkit.training.data import take_apart
from nbtoolkit.training.loader import make_train_loader


def write(path: Path, value: int = 100, size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of two images each, made in another order than that of their names."""
    for name, value in (("moth", 200), ("ant", 0), ("bee", 51)):
        for number in (1, 0):
            write(tmp_path / "set" / name / f"patient_{number}.png", value)
    (tmp_path / "set" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "set" / ".cache").mkdir()
    return tmp_path / "set"


def test_a_folder_per_class_has_sorted_classes_and_paths(folder: Path) -> None:
    images = from_folder(folder, size=(4, 4), channels=1, group_pattern=r"(patient_\d+)")
    assert images.classes == ("ant", "bee", "moth")
    assert images.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert list(images.items) == sorted(images.items)
    assert images.groups == ("patient_0", "patient_1") * 3
    image, label = images[2]
    assert (image.shape, image.dtype, label) == ((1, 4, 4), torch.float32, 1)
    assert image.unique().tolist() == pytest.approx([0.2])


def write_table(file: Path, rows: list[dict[str, str]]) -> Path:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_a_table_gives_the_same_images_as_the_folder(folder: Path) -> None:
    of_folder = from_folder(folder)
    rows = [
        {"path": f"{path.parent.name}/{path.name}", "label": path.parent.name, "group": path.stem}
        for path in sorted(folder.glob("*/*.png"), reverse=True)
    ]
    images = from_table(write_table(folder / "table.csv", rows))
    assert images.classes == of_folder.classes
    assert list(images.items) == list(of_folder.items)[::-1]
    assert images.labels.tolist() == [2, 2, 1, 1, 0, 0]
    assert images.groups == ("patient_1", "patient_0") * 3


def test_a_subset_keeps_classes_groups_and_order(folder: Path) -> None:
    images = from_folder(folder, group_pattern=r"(patient_\d)").subset([5, 0])
    assert images.classes == ("ant", "bee", "moth")
    assert images.labels.tolist() == [2, 0]
    assert images.groups == ("patient_1", "patient_0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": ""}, r"row 1 of .* has no 'label'\n.*path and label"),
        ({"path": "ant/none.png"}, r"row 1 of .*: there is no file .*ant/none\.png"),
    ],
)
def test_a_wrong_row_is_named(folder: Path, change: dict[str, str], message: str) -> None:
    row = {"path": "ant/patient_0.png", "label": "ant"}
    with pytest.raises(FitError, match=message):
        from_table(write_table(folder / "table.csv", [row, row | change]))


def test_a_table_without_the_columns_is_refused(folder: Path) -> None:
    row = {"path": "ant/patient_0.png", "kind": "ant"}
    with pytest.raises(FitError, match=r"table\.csv has no rows with a path and a label"):
        from_table(write_table(folder / "table.csv", [row]))


def test_an_empty_class_and_a_path_without_a_group_are_named(folder: Path) -> None:
    with pytest.raises(FitError, match=r"ant/patient_0\.png has no group by data\.group_pattern"):
        from_folder(folder, group_pattern="scene_(.)")
    with pytest.raises(FitError, match="a regular expression with a group"):
        from_folder(folder, group_pattern=r"patient_\d")
    (folder / "wasp").mkdir()
    with pytest.raises(FitError, match=r"set has no image of the class 'wasp'"):
        from_folder(folder)
    with pytest.raises(FitError, match="has no class"):
        from_folder(folder / "wasp")


def test_a_table_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"rows\.csv"):
        from_table(folder / "rows.csv")


def test_damaged_images_are_found_before_training(folder: Path) -> None:
    whole = (folder / "bee" / "patient_0.png").read_bytes()
    (folder / "bee" / "patient_0.png").write_bytes(whole[: len(whole) // 2])
    (folder / "moth" / "patient_1.png").write_text("not an image")
    damaged = from_folder(folder).damaged()
    assert sorted(damaged) == [2, 5]
    assert "bee/patient_0.png cannot be decoded" in damaged[2]


def test_a_damaged_jpeg_is_found(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "one.jpg")
    (tmp_path / "one.jpg").write_bytes((tmp_path / "one.jpg").read_bytes()[:2000])
    with pytest.raises(FitError, match=r"one\.jpg cannot be decoded: OSError: .*truncated"):
        decode(str(tmp_path / "one.jpg"), None, 3)


def test_a_phone_s_picture_is_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.new("RGB", (8, 4)).save(tmp_path / "one.jpg", exif=exif)
    assert decode(str(tmp_path / "one.jpg"), None, 3).shape == (3, 8, 4)


class Jitter:
    """Draws from all three global generators."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return image + drawn


def test_augmentation_does_not_depend_on_the_workers(folder: Path, tmp_path: Path) -> None:
    seen = []
    for workers in (0, 2):
        images = from_folder(folder, size=(4, 4), transforms=[Jitter()])
        (ctx,) = contexts(tmp_path / f"run{workers}", train__batch_size=3)
        config = ctx.config.with_overrides({"train.num_workers": workers})
        loader = make_train_loader(ctx, config, take_apart(images))
        seen.append([batch for batch, _ in loader.batches(1)])
    for (images0, labels0), (images2, labels2) in zip(*seen, strict=True):
        assert torch.equal(images0, images2)
        assert torch.equal(labels0, labels2)


def test_a_damaged_image_in_a_worker_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "bee" / "patient_0.png").write_text("no image")
    (ctx,) = contexts(tmp_path / "run", train__num_workers=1, train__batch_size=6)
    loader = make_train_loader(ctx, ctx.config, take_apart(from_folder(folder)))
    with pytest.raises(FitError, match=r"bee/patient_0\.png cannot be decoded"):
        list(loader.batches(1))


def test_three_hundred_classes_keep_their_numbers(tmp_path: Path) -> None:
    write(tmp_path / "one.png")
    rows = [{"path": "one.png", "label": f"{n % 300:03}"} for n in range(900)]
    images = from_table(write_table(tmp_path / "table.csv", rows))
    assert len(images.classes) == 300
    assert images.labels.max() == 299
    assert images.labels.tolist() == [int(row["label"]) for row in rows]
    train, valid = split(images.labels)
    assert sorted(train + valid) == list(range(900))
    assert set(images.labels[train].tolist()) == set(range(300))


def test_a_split_keeps_groups_on_one_side() -> None:
    labels = torch.arange(400) % 4
    groups = [f"patient {number // 10}" for number in range(400)]
    train, valid = split(labels, groups, valid_share=0.25)
    sides = [{groups[index] for index in part} for part in (train, valid)]
    assert not sides[0] & sides[1]
    assert len(valid) == 100
    assert split(labels, groups, valid_share=0.25) == (train, valid)


def test_without_groups_every_class_has_an_image_to_train_on() -> None:
    labels = torch.tensor([0] * 20 + [1] * 3 + [2])
    for seed in range(8):
        train, valid = split(labels, seed=seed)
        assert set(labels[train].tolist()) == {0, 1, 2}
        assert sorted(train + valid) == list(range(24))


def test_too_large_a_share_is_refused() -> None:
    with pytest.raises(FoldError, match=r"data\.valid_share is 0\.9"):
        split(torch.arange(10) % 2, valid_share=0.9)


def test_images_in_memory_are_a_data_set_too() -> None:
    pixels = torch.rand(5, 1, 8, 8)
    images = Images(pixels, torch.arange(5), tuple("abcde"))
    assert torch.equal(images.subset([3, 1])[0][0], pixels[3])
