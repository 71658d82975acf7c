"""What a notebook stores, after JupyterLab's sanitizer: as in a notebook that is not trusted."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_folders import cross_validation, folder, run, started, sweep
from run_folders import trained, write_run

import nbtoolkit as nb
from nbtoolkit.run.events import TrialChanged
from nbtoolkit.run.output import charts
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.study.importance import Importance, ParameterShare
from nbtoolkit.views.page import page_html
from nbtoolkit.views.state import read_state
from nbtoolkit.views.watcher import static

# What of our pages JupyterLab 4.6.6 lets through: _generateOptions() of
# packages/apputils/src/sanitizer.ts, checked below against the installed JupyterLab.
TAGS = {*["b", "div", "h3", "img", "p", "pre", "span", "table", "tbody", "td", "th", "thead", "tr"]}
ATTRIBUTES = {
    "*": {"class", "style", "title"},
    "img": {"alt", "height", "src", "width"},
    "table": {"cellpadding"},
    "th": {"scope"},
}
SCHEMES_OF = {"href", "cite"}  # an image may have a data: address

# It removes them, and a person misses nothing: they are for screen readers.
UNSEEN = re.compile("role|aria-.*")


class Sanitized(HTMLParser):
    """What is left of a page: texts of elements that are removed stay, as in JupyterLab."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.removed: set[str] = set()
        self.images: list[dict[str, str | None]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in TAGS:
            self.removed.add(f"<{tag}>")
            return
        kept = ATTRIBUTES["*"] | ATTRIBUTES.get(tag, set())
        names = {name for name, _ in attrs if not UNSEEN.fullmatch(name)}
        self.removed |= {f"{tag} {name}" for name in names - kept}
        if tag == "img":
            self.images.append(dict(attrs))


def several_objectives(parent: Path) -> RunPaths:
    events = [started(search="sweep")]
    for number in range(3):
        params = {"optim.lr": 0.1 * (number + 1)}
        values = (number / 3, 1 - number / 3)
        events.append(
            TrialChanged(number=number, state="complete", values=values, params=params, seconds=1.0)  # type: ignore[arg-type]
        )
    paths = folder(parent, "sweep-0002", events)
    (paths.folder / "sweep.yaml").write_text(
        "study: {metric: [f1, ms], direction: [maximize, minimize]}\nbudget: {n_trials: 3}\n"
        "space: {optim.lr: {type: float, low: 0.001, high: 1.0, log: true}}\n"
    )
    return paths


def reported(parent: Path) -> RunPaths:
    return write_run(
        parent, "run-0001", events=trained({"val_loss": [2.0, 1.0], "acc": [0.1, 0.9]})
    )


def shares(_: Path) -> str:
    found = (ParameterShare("optim.lr", 0.8), ParameterShare("model.act", 0.2))
    return charts().importance_chart(Importance(found, 12, 12, 3, ()), "loss")._repr_html_()


STORED: dict[str, Callable[[Path], str]] = {
    "the handle of a run": lambda parent: static(run(parent)),
    "the handle of a cross-validation": lambda parent: static(cross_validation(parent)),
    "the handle of a sweep": lambda parent: static(sweep(parent)),
    "a sweep with two objectives": lambda parent: static(several_objectives(parent)),
    "a live view": lambda parent: static(sweep(parent, ended=9, status="running")),
    "the result of a sweep": lambda parent: page_html(read_state(sweep(parent).folder)),
    "a chart": lambda parent: charts().result_chart(sweep(parent), "history")._repr_html_(),
    "the importance": shares,
    "a finder": lambda _: found_rate(),
    "a report": lambda parent: nb.report(reported(parent).folder)._repr_html_() or "",
    "a panel": lambda parent: panel_of(reported(parent)),
}


def found_rate() -> str:
    tuning = pytest.importorskip("nbtoolkit.extras.tuning.learning_rate", reason="NOT TESTED")
    found = tuning.LearningRate(suggestion=0.1, rates=(0.01, 0.1, 1.0), losses=(2.0, 1.0, 3.0))
    return str(found._repr_html_())


def panel_of(paths: RunPaths) -> str:
    panel = nb.panel(config={"runtime.output_dir": str(paths.folder.parent)})
    try:
        return panel.html()
    finally:
        panel.close()


@pytest.mark.parametrize("what", STORED)
def test_jupyterlab_removes_nothing_of_what_a_cell_stores(what: str, tmp_path: Path) -> None:
    page = STORED[what](tmp_path)
    seen = Sanitized(page)
    assert seen.removed == set()
    assert seen.images
    for image in seen.images:
        assert (image["src"] or "").startswith("data:image/svg+xml;base64,")
        assert image["alt"]
    assert "var(" not in page  # it removes such styles, too


def test_the_sanitizer_of_this_test_removes_what_jupyterlabs_does() -> None:
    seen = Sanitized('<div onclick="x"><svg><title>hover</title></svg><style>p {}</style></div>')
    assert seen.removed == {"<svg>", "<title>", "<style>", "div onclick"}


def test_the_lists_are_those_of_the_installed_jupyterlab() -> None:
    bundles = Path(sys.prefix).glob("share/jupyter/lab/static/*.js")
    lists = "allowedTags:[", "allowedSchemesAppliedToAttributes:["
    sources = [text for text in (file.read_text() for file in bundles) if lists[0] in text]
    options = [text for text in sources if '"data-jupyter-id"' in text]
    if not options:
        pytest.skip("JupyterLab is not installed here")
    [text] = options
    text = text[text.index("_generateOptions") :]

    def listed(begin: str, after: str = "") -> set[str]:
        inside = text[text.index(begin, text.index(after)) + len(begin) :]
        ends = re.search(r"\](,[\w*\"]+:|\})", inside)
        assert ends
        return set(re.findall(r'"([\w-]+)"', inside[: ends.start()]))

    assert listed(lists[0]) >= TAGS
    assert not listed(lists[0]) & {"svg", "style", "title"}
    for tag, names in ATTRIBUTES.items():
        name = '"*"' if tag == "*" else tag
        assert listed(f"{name}:[", after="allowedAttributes:{") >= names, tag
    assert listed(lists[1]) == SCHEMES_OF
