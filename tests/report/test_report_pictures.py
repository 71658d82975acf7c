"""Pictures are legible on light and dark ground and clip no name."""

from __future__ import annotations

import io
import itertools
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from run_folders import trained, write_run

from nbtoolkit.report.report import _STYLE as STYLE
from nbtoolkit.report.report import page, read_report
from nbtoolkit.report.run_summary import thinned
from nbtoolkit.report.section import INK, Picture
from nbtoolkit.study.plots import COLOURS

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
        value = {"labels": ["<i>a</i>", "b" * 99], "predictions": ["b" * 99, "<i>a</i>"]}
        write_run(folder, name, events=diary, result=result, returned=value)
    return folder


def contrast(one: str, other: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(long(colour)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("ground", [LIGHT, DARK, "#1e1e1e"])
def test_every_line_is_seen_on_light_and_dark(colour: str, ground: str) -> None:
    assert contrast(colour, ground) >= 3


def test_texts_of_cards_and_pages_are_read() -> None:
    assert contrast(INK, "#ffffff") >= 7
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in STYLE.split("@media"))
    for scheme in (light, dark):
        assert contrast(scheme["text"], scheme["ground"]) >= 7
        assert contrast(scheme["dim"], scheme["ground"]) >= 4.5
        assert contrast(scheme["text"], scheme["band"]) >= 7
        assert contrast(scheme["text"], over(COLOURS[0], scheme["ground"])) >= 4.5


def over(colour: str, ground: str) -> str:
    """Half of a colour on a ground: the darkest cell of a matrix."""
    pairs = zip(
        *([int(one[i : i + 2], 16) for i in (1, 3, 5)] for one in (colour, long(ground))),
        strict=True,
    )
    return "#" + "".join(f"{(one + other) // 2:02x}" for one, other in pairs)


def long(colour: str) -> str:
    return colour if len(colour) == 7 else "#" + "".join(2 * one for one in colour[1:])


def drawn(figure: Figure) -> list[Text]:
    """The texts of a figure that are seen; an axis has labels beyond its ends, too."""
    beyond = {
        label
        for panel in figure.axes
        for axis in (panel.xaxis, panel.yaxis)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    seen = (text for text in figure.findobj(Text) if text.get_visible() and text.get_text())
    return [text for text in seen if text not in beyond]


def clashes(figure: Figure) -> list[str]:
    """Texts of a figure that leave it, or that lie over one another."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(io.BytesIO(), format="png", dpi=100)
        boxes = {text: text.get_window_extent() for text in drawn(figure)}
    frame = figure.bbox
    out = [
        text.get_text()
        for text, box in boxes.items()
        if box.x0 < -1 or box.y0 < -1 or box.x1 > frame.x1 + 1 or box.y1 > frame.y1 + 1
    ]
    over = [
        f"{one.get_text()} | {other.get_text()}"
        for one, other in itertools.combinations(boxes, 2)
        if boxes[one].shrunk(0.9, 0.9).overlaps(boxes[other].shrunk(0.9, 0.9))
    ]
    return out + over


def test_no_text_is_clipped_or_overlaps(nasty: Path) -> None:
    sections = read_report(nasty).sections
    figures = [part.figure for one in sections for part in one.parts if isinstance(part, Picture)]
    assert len(figures) == 2
    assert [clashes(figure) for figure in figures] == [[], []]


def test_a_clash_would_be_seen() -> None:
    figure = Figure()
    for text, x in (("one", 0.5), ("over", 0.5), ("out", 0.99)):
        figure.text(x, 0.5, text)
    assert clashes(figure) == ["out", "one | over"]


def test_names_are_names_and_no_markup_or_formula(nasty: Path) -> None:
    text = page("<u>title</u>", "<u>told</u>", read_report(nasty).sections)
    assert not re.search(r"<(img|b|i|u|script)\b", text)
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    for name in ("$x_{", "$a$ and $b$", "_hidden", "准确率_über_Größe"):
        assert name in text
    assert "_under_$5_and_$6" in text
    assert "b" * 50 not in text


def test_a_picture_for_the_page_is_an_element_with_texts_in_its_colour(nasty: Path) -> None:
    [picture] = [part for part in read_report(nasty).curves.parts if isinstance(part, Picture)]
    svg = picture.svg()
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"].startswith("learning curves of ")
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert len(texts) > 20
    assert INK not in svg
    assert svg.count("currentColor") >= len(texts)
    [again] = [part for part in read_report(nasty).curves.parts if isinstance(part, Picture)]
    assert again.svg() == svg


def test_a_picture_for_a_cell_is_opaque(nasty: Path) -> None:
    [picture] = [part for part in read_report(nasty).curves.parts if isinstance(part, Picture)]
    image = imread(io.BytesIO(picture.png()))
    assert image[0, 0, :3].tolist() == [1.0, 1.0, 1.0]
    assert image.shape[1] == pytest.approx(2 * picture.width(), abs=2)
    assert image.shape[-1] == 3 or image[..., 3].min() == 1.0


def test_a_long_line_is_thinned_and_keeps_its_end() -> None:
    points = thinned([(float(n), float(n)) for n in range(25_001)])
    assert len(points) <= 1000
    assert points[-1] == (25_000.0, 25_000.0)
    assert points == sorted(points)
    assert thinned([]) == []
