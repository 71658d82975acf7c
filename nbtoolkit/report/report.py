"""Write everything in a folder of runs as one HTML page (``nb.report``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path

from nbtoolkit.errors import ReportFolderError
from nbtoolkit.report.charts import confusion, curves, throughput
from nbtoolkit.report.run_summary import RunSummary, read_run_summary
from nbtoolkit.report.section import Picture, ReportSection
from nbtoolkit.report.sections import differences, folds, overview, sweeps
from nbtoolkit.run.paths import TRASH, RunPaths, age_key, write_whole
from nbtoolkit.text_table import counted

FILE = "report.html"

DEPTH = 4
"""Levels of folders below the reported one in which runs are looked for."""

# Text has a contrast of 15 and more to its background, dimmed text 6 and more (WCAG AA: 4.5).
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1f2328; --dim: #59636e;
  --line: #d1d9e0; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #111; --text: #e6e6e6; --dim: #9aa4af; --line: #3d444d; --band: #1c1f23; } }
body { background: var(--ground); color: var(--text); margin: 0 auto; max-width: 76rem;
  padding: 1rem 1.5rem 4rem; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .5rem;
  border-top: 1px solid var(--line); } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
nav a { color: inherit; margin-right: 1rem; } .dim { color: var(--dim); }
.part { overflow-x: auto; margin: .4rem 0; } .part p { margin: 0; }
table { border-collapse: collapse; width: max-content;
  font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; min-width: 1.2rem;
  white-space: nowrap; }
thead th, tbody th { background: var(--band); font-weight: 600; }
svg { display: block; height: auto; max-width: 100%; }
"""


def report(
    folder: str | os.PathLike[str] = "outputs", output: str | os.PathLike[str] | None = None
) -> Path:
    """Write a page on all runs in a folder, from their files alone; nothing in them is executed.

    The page holds a table of the runs, learning curves, sweeps with history, parameter importance
    and slices, cross-validations, confusion matrices, throughput and device use, and the settings
    in which the runs differ. It is a single file that needs no network, for light and dark themes.

    Args:
        folder: a run's folder, or one that holds runs.
        output: the page; None: ``report.html`` in ``folder``.

    Returns:
        The page's path.

    Raises:
        ReportFolderError: there is no such folder, or the page cannot be written.
        MissingExtra: Matplotlib is not installed.
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
    return RunsReport(path, [read_run_summary(paths) for paths in runs_below(path)])


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
        if entry.name == TRASH:
            continue
        yield from _runs(Path(entry), depth - 1)


class RunsReport:
    """The sections of a report; each is made when it is first used.

    Attributes:
        folder: the reported folder.
        runs: the runs, sweeps and cross-validations in it, oldest first.
    """

    def __init__(self, folder: Path, runs: Sequence[RunSummary]) -> None:
        self.folder, self.runs = folder, list(runs)

    @cached_property
    def overview(self) -> ReportSection:
        """All runs in one table."""
        return overview(self.runs)

    @cached_property
    def curves(self) -> ReportSection:
        """Learning curves of the newest runs."""
        return curves(self.runs)

    @cached_property
    def sweeps(self) -> ReportSection:
        """Best trials, history, parameter importance and slices of the newest sweeps."""
        return sweeps(self.runs)

    @cached_property
    def folds(self) -> ReportSection:
        """Scores of the newest cross-validations, fold by fold."""
        return folds(self.runs)

    @cached_property
    def confusion(self) -> ReportSection:
        """Predictions of the newest runs, as confusion matrices."""
        return confusion(self.runs)

    @cached_property
    def throughput(self) -> ReportSection:
        """Samples per second, and device use."""
        return throughput(self.runs)

    @cached_property
    def differences(self) -> ReportSection:
        """Settings that are not the same in all runs."""
        return differences(self.runs)

    @property
    def sections(self) -> list[ReportSection]:
        """All sections, in the order of the page."""
        names = ("overview", "curves", "sweeps", "folds", "confusion", "throughput", "differences")
        return [getattr(self, name) for name in names]

    def __repr__(self) -> str:
        return f"Report({len(self.runs)} runs, {self.folder})"


def page(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """Render the HTML page, which needs no other file, light or dark as the reader's system.

    Args:
        title: its heading.
        subtitle: a sentence below.
        sections: its contents.
    """
    links = "".join(
        f'<a href="#{_id(section)}">{escape(section.title)}</a>' for section in sections
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
{"".join(map(_section_html, sections))}
</body>
</html>
"""


def _section_html(section: ReportSection) -> str:
    parts = [part.svg() if isinstance(part, Picture) else part for part in section.parts]
    body = "\n".join(f'<div class="part">{part}</div>' for part in parts)
    return f'<h2 id="{_id(section)}">{escape(section.title)}</h2>\n{body}\n'


def _id(section: ReportSection) -> str:
    return section.title.lower().replace(" ", "-")
