"""Write everything in a folder of runs as one HTML page (``nb.report``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path

from nbtoolkit.errors import ReportFolderError
from nbtoolkit.report.charts import confusion, curves, throughput
from nbtoolkit.report.run_summary import RunSummary, counted, read_run_summary
from nbtoolkit.report.section import Picture, ReportSection
from nbtoolkit.report.sections import differences, folds, overview, sweeps
from nbtoolkit.run.paths import RunPaths, age_key, write_whole

# --- page ---
# A report as one HTML file that needs nothing else, light or dark as its reader's system.


# Text on ground has a contrast of 15 and more, what is dimmed 6 and more (WCAG AA wants 4.5).
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


def page(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """The whole page.

    Args:
        title: its heading.
        subtitle: a sentence below.
        sections: its contents.
    """
    links = "".join(f'<a href="#{_id(one)}">{escape(one.title)}</a>' for one in sections)
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
{"".join(map(_section, sections))}
</body>
</html>
"""


def _section(section: ReportSection) -> str:
    parts = "\n".join(f'<div class="part">{_markup(part)}</div>' for part in section.parts)
    return f'<h2 id="{_id(section)}">{escape(section.title)}</h2>\n{parts}\n'


def _markup(part: str | Picture) -> str:
    return part.svg() if isinstance(part, Picture) else part


def _id(section: ReportSection) -> str:
    return section.title.lower().replace(" ", "-")


# --- contents ---
# A report's sections, made from the folders of runs alone.


DEPTH = 4  # folders below the one that is reported on


class RunsReport:
    """What the folders of runs tell; each section is made when it is first asked for.

    Attributes:
        folder: what is reported on.
        stories: the runs, sweeps and cross-validations in it, oldest first.
    """

    def __init__(self, folder: Path, stories: Sequence[RunSummary]) -> None:
        self.folder, self.stories = folder, list(stories)

    @cached_property
    def overview(self) -> ReportSection:
        """All runs in one table."""
        return overview(self.stories)

    @cached_property
    def curves(self) -> ReportSection:
        """Learning curves of the newest runs."""
        return curves(self.stories)

    @cached_property
    def sweeps(self) -> ReportSection:
        """Best trials, history, importances and slices of the newest sweeps."""
        return sweeps(self.stories)

    @cached_property
    def folds(self) -> ReportSection:
        """Scores of the newest cross-validations, fold by fold."""
        return folds(self.stories)

    @cached_property
    def confusion(self) -> ReportSection:
        """Which class was taken for which."""
        return confusion(self.stories)

    @cached_property
    def throughput(self) -> ReportSection:
        """Samples a second, and use of the devices."""
        return throughput(self.stories)

    @cached_property
    def differences(self) -> ReportSection:
        """Settings that are not the same in all runs."""
        return differences(self.stories)

    @property
    def sections(self) -> list[ReportSection]:
        """All of them, in the order of the page."""
        names = ("overview", "curves", "sweeps", "folds", "confusion", "throughput", "differences")
        return [getattr(self, name) for name in names]

    def __repr__(self) -> str:
        return f"Report({len(self.stories)} runs, {self.folder})"


def read_report(folder: str | os.PathLike[str]) -> RunsReport:
    """Read the runs in a folder.

    Args:
        folder: a run's folder, or one that holds runs, at most four folders below it.

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
            allowed="a folder that this user may read; a run's is its owner's alone",
            do=f"let its owner share it: chmod go+rX {path}",
        ) from error
    return RunsReport(path, [read_run_summary(paths) for paths in runs_below(path)])


def runs_below(folder: Path) -> list[RunPaths]:
    """The runs in a folder, oldest first; not the trials and folds inside."""
    return sorted(_found(folder, DEPTH), key=lambda paths: (age_key(paths.folder), paths.folder))


def _found(folder: Path, depth: int) -> Iterator[RunPaths]:
    # both: MLflow keeps a copy of the first among a run's artifacts
    if all(os.path.isfile(folder / name) for name in ("versions.json", "events.jsonl")):
        yield RunPaths(folder)
        return
    try:
        inside = [
            Path(entry) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
        ]
    except OSError:  # somebody else's
        return
    for one in inside if depth else []:
        yield from _found(one, depth - 1)


# --- report ---


FILE = "report.html"


def report(
    folder: str | os.PathLike[str] = "outputs", output: str | os.PathLike[str] | None = None
) -> Path:
    """Write a page on all runs in a folder, from their files alone; nothing in them is executed.

    It holds a table of the runs, learning curves, sweeps with history, importances and slices,
    cross-validations, confusion matrices, throughput and use of the devices, and the settings in
    which the runs differ. It needs no other file and no network, and is read in light and dark.

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
    told = f"{counted(len(contents.stories), 'run')} in {contents.folder}"
    text = page(f"Report on {contents.folder.name}", told, contents.sections)
    try:
        write_whole(target, text, durable=False)
    except OSError as error:
        raise ReportFolderError(
            f"the report {target} cannot be written: {error.strerror or error}",
            allowed="a file in a folder on a disk with free space that you may write to",
            do='choose another place: output="report.html", or --output in a shell',
        ) from error
    return target
