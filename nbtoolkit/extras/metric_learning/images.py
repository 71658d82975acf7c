"""Read labelled images from a folder per class or a table of paths, and split them by groups."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import FitError, FoldError, FoldWarning, MissingExtra
from nbtoolkit.tasks import digits

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.search.folds.folds import FoldKind
    from nbtoolkit.worker.context import RunContext

Transform: TypeAlias = "Callable[[Tensor], Tensor]"
"""An image, float32 of shape (channels, height, width) in 0..1 -> the model's input."""

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, a data set for ``nb.fit``: files are decoded where a sample is loaded.

    Random numbers that ``transforms`` draw from the global generators depend on (seed, epoch,
    sample), because ``nb.fit`` seeds each sample.

    Attributes:
        items: paths; or the images themselves, float32 of shape (n, channels, height, width).
        labels: int64 of shape (n,), indices into ``classes``.
        classes: the classes' names.
        groups: a group for each image, which a split keeps on one side; None: no groups.
        size: height and width to which files are resized; None: they keep their own.
        channels: 1 (grey) or 3 (RGB), of files.
        transforms: applied to each image, in turn.
    """

    items: Sequence[str | os.PathLike[str]] | Tensor
    labels: Tensor
    classes: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    size: tuple[int, int] | None = (64, 64)
    channels: int = 3
    transforms: Sequence[Transform] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.image(index)
        for change in self.transforms:
            image = change(image)
        return image, int(self.labels[index])

    def image(self, index: int) -> Tensor:
        """One image without the transforms.

        Raises:
            FitError: it cannot be decoded (names the file).
        """
        item = self.items[index]
        if isinstance(item, (str, os.PathLike)):
            return decode(os.fspath(item), self.size, self.channels)
        return item

    def subset(self, indices: Iterable[int]) -> Images:
        """Return the images at ``indices``, in this order, with the same classes."""
        import torch

        rows = [int(index) for index in indices]
        items = self.items
        chosen = items[rows] if isinstance(items, torch.Tensor) else [items[row] for row in rows]
        groups = self.groups and tuple(self.groups[row] for row in rows)
        return replace(self, items=chosen, labels=self.labels[rows], groups=groups)

    def damaged(self) -> dict[int, str]:
        """Decode every file, and return the index of each one that fails, with the reason."""

        def fault(index: int) -> str:
            try:
                self.image(index)
            except FitError as error:
                return error.what
            return ""

        with ThreadPoolExecutor(8) as pool:
            faults = pool.map(fault, range(len(self)))
            return {index: text for index, text in enumerate(faults) if text}


def decode(path: str, size: tuple[int, int] | None, channels: int) -> Tensor:
    """Read an image file as float32 of shape (channels, height, width) in 0..1, upright (EXIF).

    Args:
        path: of a file that Pillow can read.
        size: height and width to resize to; None: as in the file.
        channels: 1 or 3.

    Raises:
        FitError: the file is missing, damaged or no image.
        MissingExtra: Pillow is not installed.
    """
    import numpy as np
    import torch

    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtra(
            "image files are decoded by Pillow, which is not installed",
            do=install_line("metric-learning"),
        ) from error
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("L" if channels == 1 else "RGB")
        if size is not None and image.size != size[::-1]:
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    # Pillow's decoders raise all of these for damaged files.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise FitError(
            f"the image {path} cannot be decoded: {type(error).__name__}: {error}",
            allowed="undamaged files that Pillow can read",
            do="replace the file, or leave it out: data.skip_damaged: true",
        ) from error
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1).contiguous()


def load_images(config: Config) -> Images:
    """Return the images that ``data.folder`` or ``data.table`` names; without them the digits.

    Raises:
        FitError: they cannot be used.
    """
    data = config.data
    side = config.data.get("size", 64)
    pair = (side, side) if isinstance(side, int) else side and (side[0], side[1])
    options: dict[str, Any] = {"size": pair, "channels": data.get("channels", 3)}
    if "folder" in data:
        return from_folder(data.folder, group_pattern=data.get("group_pattern"), **options)
    if "table" in data:
        return from_table(data.table, **options)
    pixels, labels = digits.load()
    return Images(pixels.reshape(-1, 1, 8, 8), labels, tuple("0123456789"), size=(8, 8), channels=1)


def from_folder(
    root: str | os.PathLike[str], *, group_pattern: str | None = None, **options: Any
) -> Images:
    """Return the images below ``root``, which has one folder per class, sorted by path.

    Args:
        root: the folder; each folder in it is a class, searched with all of its subfolders.
        group_pattern: a regular expression with one group ``(...)``, searched for in each path
            below ``root``: its text is the image's group (``patient_([0-9]+)``).
        options: ``size``, ``channels`` and ``transforms`` of :class:`Images`.

    Raises:
        FitError: there is no such folder, a class is empty, or a path has no group.
    """
    top = Path(root).expanduser().absolute()
    folders = [path for path in sorted(top.glob("*")) if path.is_dir() and path.name[0] != "."]
    pattern = re.compile(group_pattern or "()")
    rows = []
    faults = [] if folders else [f"{top} has no class"]
    for folder in folders:
        files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
        if not files:
            faults.append(f"{top} has no image of the class {folder.name!r}")
        for file in files:
            match = pattern.search(os.path.relpath(file, top))
            if match is None or not pattern.groups:
                faults.append(f"{file} has no group by data.group_pattern {group_pattern!r}")
                break
            rows.append({"path": str(file), "label": folder.name, "group": match[1]})
    if faults:
        raise FitError(
            faults[0],
            allowed=f"one folder per class with files {', '.join(SUFFIXES)}; as group_pattern a "
            "regular expression with a group, such as (patient_[0-9]+), found in every path",
            do="check data.folder and data.group_pattern, or remove the empty folder",
        )
    return _of_rows(rows, grouped=group_pattern is not None, **options)


def from_table(table: str | os.PathLike[str], **options: Any) -> Images:
    """Return the images that a CSV file names. Labels become text; classes are sorted.

    Args:
        table: with a header and the columns ``path`` (relative to the table's folder), ``label``
            and, optionally, ``group``.
        options: ``size``, ``channels`` and ``transforms`` of :class:`Images`.

    Raises:
        FitError: the table has no rows, or a column, a value or a file is missing (names the row).
    """
    file = Path(table).expanduser().absolute()
    with file.open(newline="", encoding="utf-8-sig") as opened:
        rows = list(csv.DictReader(opened))
    columns = [name for name in ("path", "label", "group") if rows and name in rows[0]]
    faults = []
    if not {"path", "label"} <= set(columns):
        faults.append(f"{file} has no rows with a path and a label")
    for number, row in enumerate(rows):
        faults += [f"row {number} of {file} has no {name!r}" for name in columns if not row[name]]
        row["path"] = str(file.parent / row.get("path", ""))
        if not os.path.exists(row["path"]):
            faults.append(f"row {number} of {file}: there is no file {row['path']}")
    if faults:
        raise FitError(
            faults[0],
            allowed="a CSV file with the columns path and label, perhaps group, and a value in "
            "each row; paths of files, relative to the table's folder",
            do="correct the file that data.table names",
        )
    return _of_rows(rows, grouped="group" in columns, **options)


def _of_rows(rows: Sequence[Mapping[str, str]], *, grouped: bool, **options: Any) -> Images:
    import numpy as np
    import torch

    classes, labels = np.unique([row["label"] for row in rows], return_inverse=True)
    groups = tuple(row["group"] for row in rows) if grouped else None
    paths = [row["path"] for row in rows]
    return Images(paths, torch.from_numpy(labels), tuple(classes.tolist()), groups, **options)


def split(
    labels: Tensor,
    groups: Sequence[str] | None = None,
    *,
    valid_share: float = 0.2,
    seed: int = 0,
) -> tuple[list[int], list[int]]:
    """Split images into indices to train and to validate on, stratified by class.

    Args:
        labels: int64 of shape (n,).
        groups: a group for each image; all of a group go to one side.
        valid_share: of the validation part, about: the images are cut into ``1 / valid_share``
            folds by :func:`nbtoolkit.make_folds`, one of which validates.
        seed: of the shuffle.

    Returns:
        Both lists, ascending. Without groups, every class has an image to train on.

    Raises:
        FoldError: there are too few images or groups.
        MissingExtra: scikit-learn is not installed.
    """
    from nbtoolkit.search.folds.make_folds import make_folds

    if not 0 < valid_share <= 0.5:
        raise FoldError(
            f"data.valid_share is {valid_share}",
            allowed="a number above 0, at most 0.5",
            do="set data.valid_share: 0.2",
        )
    # A class with fewer images than folds is not in all of them; at least one class has to be.
    most = len(set(groups)) if groups else int(labels.bincount().max())
    k = max(2, min(round(1 / valid_share), most))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FoldWarning)
        kind: FoldKind = "stratified_group" if groups else "stratified"
        fold = make_folds(labels.numpy(), k=k, kind=kind, groups=groups, seed=seed)[0]
    train = fold.train_indices.tolist()
    valid = fold.valid_indices.tolist()
    if not groups:
        trained = set(labels[train].tolist())
        train = sorted([*train, *(i for i in valid if int(labels[i]) not in trained)])
        valid = [i for i in valid if int(labels[i]) in trained]
    return train, valid


def leave_out_damaged(
    ctx: RunContext, images: Images, parts: Sequence[Sequence[int]], *, allowed: bool
) -> list[list[int]]:
    """Return the indices in ``parts`` without those of damaged files.

    Files that were decoded once are not decoded again, until their size or their time changes.

    Args:
        ctx: the run's context.
        images: of all parts.
        parts: indices.
        allowed: ``data.skip_damaged``: warn about damaged files.

    Raises:
        FitError: there are damaged files, and ``allowed`` is false.
    """
    files = [os.fspath(item) for item in images.items if isinstance(item, (str, os.PathLike))]
    states = [(path, os.stat(path)) for path in files]
    lines = [f"{path} {state.st_size} {state.st_mtime_ns}\n" for path, state in states]
    key = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    damaged = ctx.cached(f"damaged images of {key}", images.damaged) if files else {}
    report = f"{len(damaged)} of {len(images)} images are damaged: {'; '.join(damaged.values())}"
    if damaged and not allowed:
        raise FitError(
            report[:2000],
            allowed="images that Pillow can decode",
            do="replace them, or set data.skip_damaged: true",
        )
    if damaged and ctx.is_main:
        ctx.message(f"left out: {report[:2000]}", level="warning")
    return [[index for index in part if index not in damaged] for part in parts]
