"""A report is legible on light and dark ground, and names are text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_folders import trained, write_run

from nbtoolkit.cards import BEST, ENDED, FAILED
from nbtoolkit.views.chart import PALETTE
from nbtoolkit.views.report import _STYLE as STYLE
from nbtoolkit.views.report import page, read_report

LIGHT, DARK = "#ffffff", "#111111"  # of JupyterLab's themes and of the page

METRICS = [
    "train_loss",
    "val_loss",
    "val_<b>bold</b>_&_accuracy",
    "准确率_über_Größe",
    "val_f1_of_the_rarest_class_weighted_by_its_inverse_frequency",
    "$x_{",
    "$a$ and $b$",
    "_hidden",
]

NAMES = [
    "20260101T000000-a_very_long_name_of_an_experiment_with_many_words-0001",
    "20260101T000001-a_very_long_name_of_an_experiment_with_many_words-0002",
    "20260102T000000-<img src=x onerror=alert(1)>",
    "20260103T000000-_under_$5_and_$6",
    "ünïcode-模型-ß",
]


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose names, metrics and settings are as bad as names can be."""
    folder = tmp_path_factory.mktemp("nasty")
    for number, name in enumerate(NAMES):
        series = {metric: [0.1 * (number + step) for step in range(5)] for metric in METRICS}
        config = {"model": {"<i>κ</i>": number, "name": "x" * 300}, "optim": {"lr": 10**-number}}
        result = {"status": "completed", "metrics": dict.fromkeys(METRICS, 1 / (number + 3))}
        diary = trained(series, config)
        write_run(folder, name, events=diary, ended=result)
    return folder


def contrast(one: str, other: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(long(colour)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [*PALETTE, BEST, ENDED, FAILED])
@pytest.mark.parametrize("ground", [LIGHT, DARK, "#1e1e1e"])
def test_every_line_is_seen_on_light_and_dark(colour: str, ground: str) -> None:
    assert contrast(colour, ground) >= 3


def test_texts_of_cards_and_pages_are_read() -> None:
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in STYLE.split("@media"))
    for scheme in (light, dark):
        assert contrast(scheme["text"], scheme["ground"]) >= 7
        assert contrast(scheme["dim"], scheme["ground"]) >= 4.5
        assert contrast(scheme["text"], over(PALETTE[0], scheme["ground"])) >= 4.5


def over(colour: str, ground: str) -> str:
    """Half of a colour on a ground: the darkest cell of a matrix."""
    pairs = zip(
        *([int(one[i : i + 2], 16) for i in (1, 3, 5)] for one in (colour, long(ground))),
        strict=True,
    )
    return "#" + "".join(f"{(one + other) // 2:02x}" for one, other in pairs)


def long(colour: str) -> str:
    return colour if len(colour) == 7 else "#" + "".join(2 * one for one in colour[1:])


def test_names_are_names_and_no_markup_or_formula(nasty: Path) -> None:
    text = page("<u>title</u>", "<u>told</u>", read_report(nasty).sections)
    assert not re.search(r"<(img|i|u|script)\b", text)
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    for name in ("$x_{", "$a$ and $b$", "_hidden", "准确率_über_Größe"):
        assert name in text
    assert "_under_$5_and_$6" in text
    assert "b" * 50 not in text
