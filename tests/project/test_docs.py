"""The pages of the docs: snippets compile, those not marked `no-run` run, links are valid.

The snippets of a page run in one namespace of their own, from top to bottom. On pages that
show what their code prints, the ```text blocks below it are compared with what it prints. Shell
lines are parsed by the command line, YAML is read by its loader.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
import yaml
from whole import needs_extras

import nbtoolkit
from nbtoolkit.__main__ import command_line
from nbtoolkit.config.fields import allowed_values
from nbtoolkit.config.schema import Config
from nbtoolkit.environment import grace
from nbtoolkit.notebooks.pipeline_file import load_pipeline
from nbtoolkit.search.study.sweep_config import SweepConfig, load_sweep_config

pytestmark = needs_extras

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
START = ROOT / "docs/index.rst"  # the site's first page

# Pages whose snippets another test runs.
RUN_ELSEWHERE = {"docs/tensorflow.md": "extras/integrations/test_tensorflow.py"}

# Folders of pages that show what their code prints.
SHOW_OUTPUT = ("docs/explanation/", "docs/how-to/", "docs/moving/", "docs/settings.md")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


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
        Snippet(name_of(page), text[: block.start(2)].count("\n") + 1, block[2], not block[1])
        for block in found
    ]


def first_page() -> Snippet:
    """The code of the site's first page, which is reStructuredText."""
    text = START.read_text()
    block = re.search(r"(?m)^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", text)
    assert block is not None
    line = text[: block.start(1)].count("\n") + 1
    return Snippet(name_of(START), line, re.sub(r"(?m)^   ", "", block[1]), runs=True)


SNIPPETS = [first_page(), *(snippet for page in PAGES for snippet in snippets(page))]
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


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_snippet_passes_arguments_that_exist(snippet: Snippet) -> None:
    """Most of all for the snippets that do not run."""
    for call in ast.walk(ast.parse(snippet.code)):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("nb."):
            continue
        called = getattr(nbtoolkit, ast.unparse(call.func).removeprefix("nb."), None)
        if called is None:
            continue  # a method of what a call returned, or a name of nb.errors
        parameters = inspect.signature(called).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            given = {keyword.arg for keyword in call.keywords if keyword.arg}
            assert given <= {parameter.name for parameter in parameters}, ast.unparse(call)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_says_what_it_holds(page: Path) -> None:
    """A slip in a fence would hide its snippet from these tests."""
    opening = names(page, r"(?m)^```(.*)$")[::2]
    known = {"python", "python no-run", "bash", "diff", "text", "yaml", "json", ""}
    assert [fence for fence in opening if fence not in known] == []
    assert sum(fence.startswith("python") for fence in opening) == len(snippets(page))


# The code of other pages takes 5 s and more; what it shows has tests of its own in `make test`.
QUICK = ["README.md"]

# What these set, load or fork is a matter of the whole process.
ALONE = {
    "docs/competition/deadline.md",
    "docs/how-to/cannot-pickle.md",
    "docs/how-to/cuda-initialized.md",
    "docs/how-to/rank-hangs/errors.md",
}


def groups() -> list[list[str]]:
    """The pages that run, some together: each process takes 5 s to start, and to start ranks."""
    others = [name for name in TO_RUN if name not in ALONE and name not in QUICK]
    together = [others[at : at + 4] for at in range(0, len(others), 4)]
    return [[name] for name in sorted(ALONE & {*TO_RUN})] + together


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(QUICK, id="quick"),
        *(pytest.param(some, marks=pytest.mark.long, id=some[0]) for some in groups()),
    ],
)
def test_pages_run(pages: list[str], tmp_path: Path) -> None:
    folders = {name: tmp_path / str(at) for at, name in enumerate(pages)}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "page.py").write_text(code_of(name))
    program = [sys.executable, "-W", "error", ROOT / "tests/support/page_runner.py"]
    done = subprocess.run(
        [*program, *folders.values()], cwd=tmp_path, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    failed = done.stdout.split()
    for name, folder in folders.items():
        printed, errors = ((folder / f"std{of}.txt").read_text() for of in ("out", "err"))
        assert str(folder) not in failed, f"{name}: {printed}{errors}"
        if name.startswith(SHOW_OUTPUT):
            lines = [comparable(line) for line in printed.splitlines()]
            shown = list(shown_output(ROOT / name))
            assert [line for line in shown if comparable(line) not in lines] == [], printed


def code_of(name: str) -> str:
    """The snippets of a page that run, on the lines where they stand."""
    lines: list[str] = []
    for snippet in SNIPPETS:
        if snippet.page == name and snippet.runs:
            lines += [""] * (snippet.line - 1 - len(lines))  # errors name the page's own lines
            lines += snippet.code.splitlines()
    return "\n".join(lines)


def shown_output(page: Path) -> Iterator[str]:
    """The lines of the text blocks that stand directly below code."""
    for block in names(page, r"(?ms)^```\n\n```text\n(.*?)^```$"):
        yield from block.splitlines()


def comparable(line: str) -> str:
    """A line without what differs from run to run: numbers, identifiers, folders, widths."""
    line = re.sub(r"\d{8}T\d{6}-(\w+)-[0-9a-f]{4}", r"ID-\1", line)
    line = re.sub(r"\b(sweep|crossval)-[0-9a-f]{4}\b", r"\1-#", line)
    line = re.sub(r"\S*/([\w.-]+)", r"\1", line).replace("notebook.py", "page.py")
    return " ".join(re.sub(r"-?\d[\d.]*(e-?\d+)?", "#", line).split())


def test_only_what_differs_from_run_to_run_is_left_out_of_the_comparison() -> None:
    assert comparable("trial 3  0.25 s ./notebook.py:7") == comparable("trial 12  1 s /t/page.py:9")
    assert comparable("sweep-eb92: interrupted") == comparable("sweep-6901: interrupted")
    assert comparable("2 complete") != comparable("2 pruned")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_shell_line_is_a_command_with_options_that_exist(page: Path) -> None:
    """Nothing runs: the command line and the Makefile are asked."""
    group = typer.main.get_command(command_line())
    root = group.make_context("nbtoolkit", [], resilient_parsing=True)
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    for block in names(page, r"(?ms)^```bash\n(.*?)^```$"):
        for line in block.splitlines():
            program, *words = shlex.split(line, comments=True) or [""]
            if program == "nbtoolkit":
                command = group.get_command(root, words[0])
                assert command is not None, line
                command.make_context(words[0], words[1:], parent=root)
            elif program == "make":
                assert set(words) <= targets, line
            else:
                known = {"", "(python", "git", "kaggle", "pgrep", "pip", "python", "cd"}
                known |= {"torchrun"}
                assert program in known, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_diff_applies_to_this_version(page: Path, tmp_path: Path) -> None:
    for text in names(page, r"(?ms)^```diff\n(.*?)^```$"):
        (tmp_path / "a.diff").write_text(text)
        done = subprocess.run(
            ["git", "apply", "--check", "--verbose", tmp_path / "a.diff"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "Skipped" not in done.stderr  # what git says outside of its folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("add-a-setting", "tests/config/test_every_field_fit.py"),
        ("add-a-sampler", "tests/study/test_study.py"),
        ("add-an-integration", "tests/extras/integrations/test_ignite.py"),
    ],
)
def test_the_examples_for_contributors_pass_their_tests(
    name: str, tests: str, tmp_path: Path
) -> None:
    page = (ROOT / f"docs/CONTRIBUTING/{name}.md").read_text()
    (tmp_path / "a.diff").write_text(page.split("```diff\n")[1].split("```")[0])
    for part in ("config", "nbtoolkit", "tests", "pyproject.toml"):
        copy = shutil.copy2 if (ROOT / part).is_file() else shutil.copytree
        copy(ROOT / part, tmp_path / part)
    subprocess.run(["git", "apply", "a.diff"], cwd=tmp_path, check=True)
    program = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    chosen = ["-k", "train.target or nsga2 or ignite", *tests.split()]
    done = subprocess.run(
        program + chosen,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b1 (passed|skipped)", done.stdout)


def test_readme_is_among_the_pages_that_run() -> None:
    assert "README.md" in TO_RUN
    assert all((ROOT / "tests" / test).exists() for test in RUN_ELSEWHERE.values())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in names(page, r"\]\(([^)\s]+)\)"):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_relative_to(ROOT), target
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_public_names_are_there(page: Path) -> None:
    used = set(names(page, r"\bnb\.([a-zA-Z_]+)"))
    assert used - set(nbtoolkit.__all__) - {"errors"} == set()


SETTINGS = allowed_values(Config).keys() | allowed_values(SweepConfig).keys()
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_are_there(page: Path) -> None:
    """`train.epochs` in code, with or without a value behind it."""
    if page.name in ("CHANGELOG.md", "log.md"):
        return  # these name settings of older versions
    used = names(page, rf"(?<!`)`((?:{'|'.join(SECTIONS)})\.[a-z_]+)(?=[`:= ])")
    files = (".py", ".yaml", ".json", ".jsonl")
    assert {name for name in used if not name.endswith(files)} - SETTINGS == set()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("docs/launch/end.md", f"kills the ranks after {grace.STOP_GRACE:g} s"),
        ("docs/launch/control.md", f"have not ended after {grace.STOP_GRACE:g} s"),
        ("docs/launch/control.md", f"does not kill them after {grace.STOP_GRACE:g} s"),
        ("docs/how-to/stop-training.md", f"has not ended after {grace.STOP_GRACE:g} s is killed"),
        ("docs/how-to/rank-hangs.md", f"do not end within {grace.STOP_GRACE:g} s"),
        ("docs/architecture/processes-end.md", f"then have {grace.STOP_GRACE:g} s to leave"),
        ("docs/architecture/processes-end.md", f"ranks get {grace.FAILURE_GRACE:g} s to exit"),
        ("docs/architecture/processes-end.md", f"then get {grace.EXIT_GRACE:g} s to exit"),
        ("docs/architecture/processes-end.md", f"wait exceeds {grace.REPORT_SECONDS:g} s"),
        ("docs/architecture/processes-end.md", f"no progress for {grace.STALL_SECONDS:g} s"),
    ],
)
def test_pages_name_the_grace_periods_of_the_code(name: str, sentence: str) -> None:
    assert sentence in " ".join((ROOT / name).read_text().split())
