"""The pages of the docs: snippets compile, those not marked `no-run` run, links are valid.

The snippets of a page run in one namespace, in a fresh process, from top to bottom.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import nbtoolkit
from nbtoolkit.pipeline.load import load_pipeline
from nbtoolkit.study.sweep_config import SweepConfig, load_sweep_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

# Pages whose snippets another test runs.
RUN_ELSEWHERE = {"tensorflow.md": "integrations/test_tensorflow.py"}


@dataclass(frozen=True)
class Snippet:
    """A fenced block of Python."""

    page: str
    line: int
    """The line of the page on which its first line stands."""
    code: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    found = re.finditer(r"(?ms)^```python( no-run)?\n(.*?)^```$", text)
    return [
        Snippet(page.name, text[: block.start(2)].count("\n") + 1, block[2], not block[1])
        for block in found
    ]


SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]
TO_RUN = sorted({snippet.page for snippet in SNIPPETS if snippet.runs} - RUN_ELSEWHERE.keys())


def names(page: Path, pattern: str) -> list[str]:
    return re.findall(pattern, page.read_text())


def anchors(page: Path) -> set[str]:
    """The headings as GitHub links to them."""
    headings = names(page, r"(?m)^#+ (.*)$")
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_snippet_compiles(snippet: Snippet) -> None:
    ast.parse("\n" * (snippet.line - 1) + snippet.code, filename=snippet.page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_says_what_it_holds(page: Path) -> None:
    """A slip in a fence would hide its snippet from these tests."""
    opening = names(page, r"(?m)^```(.*)$")[::2]
    known = {"python", "python no-run", "bash", "text", "yaml", "json", ""}
    assert [fence for fence in opening if fence not in known] == []
    assert sum(fence.startswith("python") for fence in opening) == len(snippets(page))


# The code of other pages takes 5 s and more; what it shows has tests of its own in `make test`.
QUICK = {"README.md"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in TO_RUN],
)
def test_page_runs(name: str, tmp_path: Path) -> None:
    lines: list[str] = []
    for snippet in SNIPPETS:
        if snippet.page == name and snippet.runs:
            lines += [""] * (snippet.line - 1 - len(lines))  # errors name the page's own lines
            lines += snippet.code.splitlines()
    script = tmp_path / name.replace(".md", ".py")
    script.write_text("\n".join(lines))
    program = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_yaml_snippet_is_a_configuration_a_sweep_or_a_pipeline(
    page: Path, tmp_path: Path
) -> None:
    for text in names(page, r"(?ms)^```yaml\n(.*?)^```$"):
        file = tmp_path / "snippet.yaml"
        file.write_text(text)
        if "steps" in yaml.safe_load(text):
            load_pipeline(file)
        elif set(yaml.safe_load(text)) & set(SweepConfig.model_fields):
            load_sweep_config(file, nbtoolkit.load_config(env=None), n_trials=1)
        else:
            nbtoolkit.load_config(file, env=None)


def test_readme_is_among_the_pages_that_run() -> None:
    assert "README.md" in TO_RUN
    assert all((ROOT / "tests" / test).exists() for test in RUN_ELSEWHERE.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in names(page, r"\]\(([^)\s]+)\)"):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_relative_to(ROOT), target
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_public_names_are_there(page: Path) -> None:
    used = set(names(page, r"\bnb\.([a-zA-Z_]+)"))
    assert used - set(nbtoolkit.__all__) - {"errors"} == set()
