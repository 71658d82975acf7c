"""Charts: any numbers make a picture, in colours that are seen in light and dark themes."""

from __future__ import annotations

import re
from base64 import b64decode
from typing import Any

import pytest
from harmless import EVIL, Tags, assert_harmless

from nbtoolkit.cards import (
    BEST,
    ENDED,
    FAILED,
    RUNNING,
    Bar,
    Card,
    Part,
    Properties,
    Table,
    Text,
    html,
    text,
)
from nbtoolkit.views import chart as charts
from nbtoolkit.views.chart import PALETTE, Axis, Series, Span, sparkline, timeline


def chart(*series: Any, **options: Any) -> str:
    """A chart as a widget shows it."""
    return shown(charts.chart(*series, **options))


def shown(part: Part, *, images: bool = False) -> str:
    return html([Card("", [part])], images=images)


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 1.0)],
        [(1.0, 0.0), (2.0, 0.0)],
        [(0.0, 9e299), (1.0, -9e299)],
        [(1.0, float("nan")), (2.0, float("inf")), (3.0, 1.0)],
        [(float(n), n % 7) for n in range(5000)],
        [(1.0, 1e-320), (2.0, 2e-320)],
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_any_numbers_make_a_picture_of_finite_ones(
    points: list[tuple[float, float]], log: bool
) -> None:
    page = chart([Series("a", points)], y=Axis(log=log), legend=True, size=(240, 140))
    assert "<svg" in page
    assert not re.search(r"nan|inf\b", page)
    assert len(page) < 40_000
    Tags(page)


def test_nothing_to_draw_is_said() -> None:
    assert "Nothing yet" in chart([Series("a", [(1.0, float("nan"))])])
    assert timeline({}, 0.0, 1.0) is None
    assert sparkline([(1.0, 1.0)], "one") is None


def test_equal_names_share_an_entry_of_the_legend() -> None:
    lines = [Series("ended", [(0.0, n), (1.0, n)]) for n in (1.0, 2.0)]
    page = chart([*lines, Series("best", [(0.0, 3.0)], "ring", BEST)], legend=True)
    assert page.count(">—<") == 1
    assert page.count(">○<") == 1


def test_a_value_beyond_the_axis_is_a_cross_on_its_edge() -> None:
    dots = Series("a", [(0.0, 1.0), (1.0, 99.0)], "dots")
    page = chart([dots], y=Axis(low=0.0, high=2.0))
    assert page.count("<circle") == 1
    assert page.count("<path") == 1


def test_a_size_sets_the_view_box_and_its_ticks() -> None:
    points = [(float(n), float(n)) for n in range(100)]
    wide, narrow = (chart([Series("a", points)], size=(width, 140)) for width in (400, 200))
    assert 'viewBox="0 0 200 140"' in narrow
    assert narrow.count("<text") < wide.count("<text")


def test_a_timeline_has_a_bar_per_job_and_hostile_names_are_texts() -> None:
    spans = [Span(0.0, 5.0, EVIL, EVIL, BEST), Span(6.0, 9.0, "1", "trial 1")]
    drawn = timeline({"slot 0": spans, EVIL: []}, 0.0, 10.0)
    assert drawn is not None
    page = shown(drawn)
    assert page.count("<rect") == 2
    left, width = (
        float(x) for x in re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', page)[1]
    )
    assert left == pytest.approx(50 + 0.6 * 270)
    assert width == pytest.approx(0.3 * 270 - 1)
    assert_harmless(page)
    assert_harmless(shown(drawn, images=True))
    assert_harmless(chart([Series(EVIL, [(0.0, 1.0)], "dots", titles=[EVIL])], x=Axis(EVIL)))


@pytest.mark.parametrize("colour", [RUNNING, ENDED, BEST, FAILED])
def test_a_label_in_a_bar_is_read_in_every_theme(colour: str) -> None:
    drawn = timeline({"slot 0": [Span(0.0, 9.0, "7", "trial 7", colour)]}, 0.0, 10.0)
    assert drawn is not None
    [bar] = re.findall("<rect[^>]*>", drawn.shapes)
    [label] = re.findall("<text([^>]*)>7<", drawn.shapes)
    assert "opacity" not in bar  # what is behind it does not count
    assert f'fill="{colour}"' in bar
    assert 'fill="#000"' in label
    assert _contrast(_rgb(colour), _rgb("#000000")) >= 4.5


def test_texts_take_the_themes_colour_and_lines_are_seen_in_both() -> None:
    page = chart([Series("loss", [(1.0, 1.0), (2.0, 2.0)])], legend=True)
    assert 'fill="currentColor"' in page
    assert not re.findall(r"<text[^>]*(?:fill|style)", page)
    for colour in {RUNNING, ENDED, BEST, FAILED, *PALETTE}:
        for ground in ("#ffffff", "#111111", "#1e1e1e"):
            assert _contrast(_rgb(colour), _rgb(ground)) >= 3  # WCAG AA for graphics


@pytest.mark.parametrize("colour", [RUNNING, ENDED, BEST, FAILED])
def test_words_in_the_colour_of_a_state_can_be_read(colour: str) -> None:
    for ground, theme in (("#ffffff", 0.0), ("#111111", 255.0), ("#1e1e1e", 255.0)):
        under = _rgb(ground)
        text = _mixed(_mixed((theme,) * 3, under, 0.87), _rgb(colour), 0.35)
        chip = _mixed(_rgb(colour), under, 0x2B / 255)
        assert _contrast(text, under) >= 4.5  # WCAG AA for text
        assert _contrast(text, chip) >= 4.5


def test_what_a_chart_shows_is_said_in_words() -> None:
    def words(*series: Series) -> str:
        [found] = re.findall('aria-label="([^"]*)"', chart(series, x=Axis("trial"), y=Axis("loss")))
        return found

    falls = Series("best so far", [(0.0, 2.5), (1.0, 0.75)], "steps", BEST)
    dots = Series("complete", [(0.0, 2.5), (1.0, 0.75), (2.0, 1.5)], "dots")
    failed = Series("failed", [(3.0, 9.0), (4.0, 9.0)], "crosses", FAILED)
    assert words(falls, dots, failed) == (
        "loss by trial: best so far from 2.5 to 0.75; 3 complete between 0.75 and 2.5; 2 failed"
    )
    lines = [Series("ended", [(0.0, n), (1.0, n / 2)]) for n in (1.0, 4.0)]
    assert words(*lines, Series("best", [(1.0, 0.25)], "ring", BEST)) == (
        "loss by trial: 2 ended between 0.5 and 4; best 0.25"
    )


def test_an_image_of_a_chart_has_its_words_its_shapes_and_one_colour_for_both_themes() -> None:
    drawn = charts.chart([Series(EVIL, [(0.0, 1.0), (1.0, 2.0)], "dots", titles=["hover", EVIL])])
    image = shown(drawn, images=True)
    assert_harmless(image)
    tags = Tags(image)
    assert tags.elements == {"div", "img"}
    assert tags.attributes == {"alt", "width", "height", "style", "src", "class"}
    svg = b64decode(tags.images[0].partition(",")[2]).decode()
    assert svg.count("<circle") == shown(drawn).count("<circle") == 2
    [grey] = set(re.findall(r' color="(#\w+)"', svg))
    assert _contrast(_rgb(grey), _rgb("#ffffff")) >= 4.5
    assert min(_contrast(_rgb(grey), _rgb(ground)) for ground in ("#111111", "#1e1e1e")) > 3.5


def test_tables_align_numbers_on_the_right() -> None:
    page = shown(Table(["name", "value"], [["a", "+0.5"], ["b", "12 s"]]))
    assert page.count("text-align:right") == 3
    assert shown(Table(["a"], [])).count("<tr") == 1
    assert shown(Properties({"a": 1})).count("<th") == 1
    assert 'aria-valuenow="50"' in shown(Bar(0.5, "half"))


def test_text_has_titles_tables_and_no_pictures_or_control_characters() -> None:
    picture = charts.chart([Series("a", [(0.0, 1.0)])])
    table = Table(["name", "value"], [["a", "1"], ["bb\x1b[31m", "22"]])
    cards = [Card("Values", [Text("two\nlines"), table], note="so far"), Card("Chart", [picture])]
    assert text(cards) == ("Values (so far)\ntwo\nlines\nname     value\na        1\nbb [31m  22")
    assert text([Card("", [Properties({"folder": "/a", "b": 1})])]) == "folder  /a\nb       1"


Colour = tuple[float, ...]


def _rgb(colour: str) -> Colour:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def _mixed(one: Colour, other: Colour, share: float) -> Colour:
    return tuple(share * a + (1 - share) * b for a, b in zip(one, other, strict=True))


def _contrast(one: Colour, other: Colour) -> float:
    """As https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Colour) -> float:
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
