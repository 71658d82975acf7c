"""The command ``nbtoolkit``, and ``python -m nbtoolkit``, which torchrun and srun can start."""

from __future__ import annotations

import sys

from nbtoolkit.errors import MissingExtra


def main() -> None:
    """Run the command line; ends the process with its exit code (see cli.py)."""
    try:
        # the others add their verbs to the first
        from nbtoolkit import cli, cli_hosts, cli_panel  # noqa: F401
    except MissingExtra as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    cli.app(prog_name="nbtoolkit")


if __name__ == "__main__":
    main()
