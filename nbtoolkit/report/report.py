"""Write everything in a folder of runs as one HTML page (``nb.report``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path

from nbtoolkit.errors import ReportFolderError
from nbtoolkit.report.sections import (
    ReportSection,
    comparison,
    overview,
    page_section,
    predictions,
    throughput,
)
from nbtoolkit.run.paths import TRASH, RunPaths, age_key, write_whole
from nbtoolkit.text_table import counted, shortened
from nbtoolkit.views.markup import view
from nbtoolkit.views.state import State, read_state

FILE = "report.html"

DEPTH = 4
"""Levels of folders below the reported one in which runs are looked for."""

PAGES = 8
"""The newest runs whose pages are in a report."""

# Text has a contrast of 15 and more to its background, dimmed text 6 and more (WCAG AA: 4.5).
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1f2328; --dim: #59636e;
  --line: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #111; --text: #e6e6e6; --dim: #9aa4af; --line: #3d444d; } }
body { background: var(--ground); color: var(--text); margin: 0 auto; max-width: 80rem;
  padding: 1rem 1.5rem 4rem; font: 13px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .5rem;
  border-top: 1px solid var(--line); }
nav a { color: inherit; margin-right: 1rem; } .dim { color: var(--dim); }
"""


def report(
    folder: str | os.PathLike[str] = "outputs", output: str | os.PathLike[str] | None = None
) -> Path:
    """Write a page on all runs in a folder, from their files alone; nothing in them is executed.

    The page holds a table of the runs; the pages of the newest eight runs, sweeps and
    cross-validations, as the panel shows them; a comparison of single runs, with learning curves
    and the settings that differ; predictions; throughput and device use. It is a single file that
    needs no network, for light and dark themes.

    Args:
        folder: a run's folder, or one that holds runs.
        output: the page; None: ``report.html`` in ``folder``.

    Returns:
        The page's path.

    Raises:
        ReportFolderError: there is no such folder, or the page cannot be written.
    """
    contents = read_report(folder)
    target = contents.folder / FILE if output is None else Path(output).expanduser().absolute()
    subtitle = f"{counted(len(contents.runs), 'run')} in {contents.folder}"
    text = page(f"Report on {contents.folder.name}", subtitle, contents.sections)
    try:
        write_whole(target, text, durable=False)
    except OSError as error:
        raise ReportFolderError(
            f"the report {target} cannot be written: {error.strerror or error}",
            allowed="a file in a folder on a disk with free space that you may write to",
            do='choose another file: output="report.html", or --output in a shell',
        ) from error
    return target


def read_report(folder: str | os.PathLike[str]) -> RunsReport:
    """Read the runs in a folder.

    Args:
        folder: a run's folder, or one that holds runs, at most four levels below it.

    Raises:
        ReportFolderError: there is no such folder, or it is another user's.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ReportFolderError(
            f"there is no folder {path} to report on",
            allowed="a run's folder, or one that holds runs: runtime.output_dir",
            do='name it: nb.report("outputs"), or nbtoolkit report outputs',
        )
    try:
        os.listdir(path)
    except OSError as error:
        raise ReportFolderError(
            f"the folder {path} cannot be read: {error.strerror}",
            allowed="a folder that this user may read; by default only its owner may read a run's",
            do=f"let its owner share it: chmod go+rX {path}",
        ) from error
    return RunsReport(path, [read_state(paths.folder) for paths in runs_below(path)])


def runs_below(folder: Path) -> list[RunPaths]:
    """Find the runs in a folder, oldest first, without the trials and folds inside them."""
    return sorted(_runs(folder, DEPTH), key=lambda paths: (age_key(paths.folder), paths.folder))


def _runs(folder: Path, depth: int) -> Iterator[RunPaths]:
    # Both files: MLflow keeps a copy of the first among a run's artifacts.
    if all(os.path.isfile(folder / name) for name in ("versions.json", "events.jsonl")):
        yield RunPaths(folder)
        return
    if not depth:
        return
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # another user's
        return
    for entry in entries:
        if entry.name != TRASH:
            yield from _runs(Path(entry), depth - 1)


class RunsReport:
    """The sections of a report; each is made when it is first used.

    Attributes:
        folder: the reported folder.
        runs: the runs, sweeps and cross-validations in it, oldest first.
    """

    def __init__(self, folder: Path, runs: Sequence[State]) -> None:
        self.folder, self.runs = folder, list(runs)

    @cached_property
    def overview(self) -> ReportSection:
        """All runs in one table."""
        return overview(self.runs)

    @cached_property
    def pages(self) -> list[ReportSection]:
        """The pages of the newest eight runs, sweeps and cross-validations, newest first."""
        return [page_section(run) for run in reversed(self.runs[-PAGES:])]

    @cached_property
    def comparison(self) -> ReportSection:
        """Learning curves and differing settings of the newest single runs; empty below two."""
        return comparison(self.runs)

    @cached_property
    def predictions(self) -> ReportSection:
        """Predictions of the newest runs: confusion matrices, or predicted by true values."""
        return predictions(self.runs)

    @cached_property
    def throughput(self) -> ReportSection:
        """Samples per second, and device use."""
        return throughput(self.runs)

    @property
    def sections(self) -> list[ReportSection]:
        """The sections that have contents, in the order of the page."""
        after = [self.comparison, self.predictions, self.throughput]
        return [one for one in (self.overview, *self.pages, *after) if one.parts]

    def __repr__(self) -> str:
        return f"Report({counted(len(self.runs), 'run')}, {self.folder})"


def page(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """Render the HTML page, which needs no other file, light or dark as the reader's system.

    Args:
        title: its heading.
        subtitle: a sentence below.
        sections: its contents.
    """
    links = "".join(
        f'<a href="#part{number}">{escape(shortened(section.title, 28))}</a>'
        for number, section in enumerate(sections)
    )
    body = "".join(
        f'<h2 id="part{number}">{escape(section.title)}</h2>{view(*section.parts)}'
        for number, section in enumerate(sections)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="dim">{escape(subtitle)}</p>
<nav>{links}</nav>
{body}
</body>
</html>
"""
