"""Start the command line: ``nbtoolkit``, or ``python -m nbtoolkit`` (for torchrun and srun)."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from nbtoolkit.environment.installed import has_extra, import_extra
from nbtoolkit.errors import MissingExtra

if TYPE_CHECKING:
    import typer


def command_line() -> typer.Typer:
    """Return the application with all commands.

    Raises:
        MissingExtra: typer is not installed.
    """
    # The other modules add their commands to the application of the first.
    from nbtoolkit import cli, cli_notebooks  # noqa: F401

    for extra in ("cluster", "tuning"):
        if has_extra(extra):
            import_extra(extra, "command")
    return cli.app


def main() -> None:
    """Run the command line and exit with its exit code (see cli.py)."""
    try:
        app = command_line()
    except MissingExtra as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # results have characters that ASCII lacks
    app(prog_name="nbtoolkit")


if __name__ == "__main__":
    main()
