"""Run the code of pages in one process, each in its own folder and namespace, as ``__main__``.

    python tests/support/page_runner.py FOLDER ...

Each folder has a ``page.py``, and gets a ``stdout.txt`` and a ``stderr.txt``. The first launch of a
process takes seconds, which the later pages save.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def _output(folder: Path) -> Iterator[None]:
    """Send what this process and its children print into files."""
    streams = {1: sys.stdout, 2: sys.stderr}
    saved = {number: os.dup(number) for number in streams}
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        for number, stream in streams.items():
            stream.flush()
            os.dup2(saved[number], number)
            os.close(saved[number])


def run(folder: Path) -> bool:
    """Whether the page's code raised nothing."""
    script = folder / "page.py"
    own = sys.modules["__main__"]
    page = ModuleType("__main__")
    page.__file__ = str(script)
    environ, path = dict(os.environ), list(sys.path)
    sys.modules["__main__"] = page
    sys.path[0] = str(folder)
    os.chdir(folder)
    with _output(folder):
        try:
            exec(compile(script.read_text(), str(script), "exec"), page.__dict__)
        except BaseException:
            traceback.print_exc()
            return False
        finally:
            sys.modules["__main__"] = own
            sys.path[:] = path
            os.environ.clear()
            os.environ.update(environ)
    return True


if __name__ == "__main__":
    failed = [folder for folder in sys.argv[1:] if not run(Path(folder))]
    print("\n".join(failed))
