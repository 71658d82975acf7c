"""Start the command line: ``nbtoolkit``, or ``python -m nbtoolkit`` (for torchrun and srun)."""

from __future__ import annotations

import sys

from nbtoolkit.errors import MissingExtra


def main() -> None:
    """Run the command line and exit with its exit code (see cli.py)."""
    try:
        # Importing the last two adds their commands to the app.
        from nbtoolkit import cli, cli_hosts, cli_panel  # noqa: F401
    except MissingExtra as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    cli.app(prog_name="nbtoolkit")


if __name__ == "__main__":
    main()
