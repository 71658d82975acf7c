"""Deadline: a run or search that ended with its session's time is packed by itself."""

from __future__ import annotations

from collections.abc import Callable

from nbtoolkit.config import load_config
from nbtoolkit.relay.pack import default_output_of, pack
from nbtoolkit.relay.result import PackResult
from nbtoolkit.runtime.host import Host, detect_host
from nbtoolkit.runtime.paths import RunPaths

_ENDING_HOSTS = ("kaggle", "colab")  # their sessions end, and take their disk with them


def pack_for_next_session(
    paths: RunPaths, say: Callable[[str], None], *, host: Host | None = None
) -> PackResult | None:
    """Pack the output folder of a run into the host's kept folder, where ``runtime.pack`` says so.

    What goes wrong is said and no error: how the run ended matters more.

    Args:
        paths: the run.
        say: shows a sentence to the user.
        host: where this is; None: detected.

    Returns:
        The bundle; None: none was wanted, or none could be written.
    """
    folder = paths.folder.parent
    try:
        host = host or detect_host()
        wish = load_config(paths.config, env=None).runtime.pack
        if not (host.kind in _ENDING_HOSTS if wish == "auto" else wish):
            return None
        packed = pack(host.kept or host.working, source=folder)
        default = default_output_of(folder)
    except Exception as error:  # whatever it is, the run's own result is to come back
        say(f"warning: nothing was packed for the next session: {error}")
        return None
    call = "nb.unpack()" if default else "nb.unpack(config=...) with this configuration"
    say(f"packed for the next session: {packed}; there, {call} and the same call go on")
    if host.kept is None:
        say(
            f"warning: {packed.path} ends with this session: download it, or mount Google Drive "
            "(/content/drive) and call nb.pack()"
        )
    return packed
