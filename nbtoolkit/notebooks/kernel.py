"""The kernel a notebook is run with: found by name, before anything is started."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import NotebookError
from nbtoolkit.notebooks.publish import TARGET as PUBLISHED
from nbtoolkit.runtime.made import TARGET as MADE

if TYPE_CHECKING:
    from nbformat import NotebookNode

_SOCKET_LENGTH = 107  # bytes of a Unix socket's path, see man 7 unix


def find_kernel(notebook: NotebookNode, wish: str | None, name: str) -> str:
    """The name of the kernel spec to run a notebook with.

    Args:
        notebook: its metadata names one; without it: ``python3``.
        wish: a name that beats the notebook's own.
        name: the notebook's name, for messages.

    Raises:
        NotebookError: there is no such kernel here, or it is not one for Python.
    """
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    wanted = wish or notebook.metadata.get("kernelspec", {}).get("name") or "python3"
    specs = KernelSpecManager()
    try:
        spec = specs.get_kernel_spec(wanted)
    except NoSuchKernel as error:
        raise NotebookError(
            f"{name} wants the kernel {wanted!r}, which is not installed here",
            allowed=", ".join(sorted(specs.find_kernel_specs())) or "none: no kernel is installed",
            do='choose one of these: kernel="python3", or --kernel python3 in a shell',
        ) from error
    if spec.language.lower() != "python":
        raise NotebookError(
            f"the kernel {wanted!r} of {name} speaks {spec.language}",
            allowed="kernels for Python",
        )
    return str(wanted)


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for one kernel, removed at the end: connection file, sockets, IPython profile.

    Sockets instead of ports: two kernels cannot meet on one, and nobody else can connect.
    """
    folder = tempfile.mkdtemp(prefix="nbtoolkit-")
    if len(os.fsencode(folder)) + len("/kernel-5") > _SOCKET_LENGTH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="nbtoolkit-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def published_file(folder: Path) -> Path:
    """Where, in a kernel's private folder, ``nb.publish`` writes."""
    return folder / "published.json"


def kernel_environ(folder: Path, runs: Path) -> dict[str, str]:
    """The variables of a kernel: this process's, and its own.

    Args:
        folder: its private folder.
        runs: the file to which it tells which runs it has started.
    """
    return {
        **os.environ,
        "IPYTHONDIR": str(folder / "ipython"),
        PUBLISHED: str(published_file(folder)),
        MADE: str(runs),
    }
