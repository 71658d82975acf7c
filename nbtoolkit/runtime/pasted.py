"""Code pasted from scripts for torchrun or a shell: what to delete, where it cannot work."""

from __future__ import annotations

import traceback

_SET_BY_TORCHRUN = {
    "RANK": "ctx.rank",
    "LOCAL_RANK": "ctx.local_rank",
    "WORLD_SIZE": "ctx.world_size",
    "MASTER_ADDR": "nothing: the ranks have met",
    "MASTER_PORT": "nothing: the ranks have met",
}
_GROUP = ("initialize the default process group twice", "environment variable RANK expected")


def advice(error: BaseException) -> str | None:
    """What to do about an error of such code; None: it is another one.

    Args:
        error: what a training function raised.
    """
    if isinstance(error, SystemExit):
        return _about_arguments(error)
    if isinstance(error, KeyError) and (name := next(iter(error.args), None)) in _SET_BY_TORCHRUN:
        return (
            f"os.environ[{name!r}] is torchrun's, and there is none on one process: put "
            f"{_SET_BY_TORCHRUN[str(name)]} in its place"
        )
    if "process group has not been initialized" in str(error):
        return (
            "one process has no process group, and needs none: ctx.rank and ctx.world_size are "
            "always there (DistributedSampler(data, ctx.world_size, ctx.rank)), ctx.prepare wraps "
            "the model, ctx.accelerator.reduce and .gather work on one process, too"
        )
    if any(said in str(error) for said in _GROUP):
        return (
            "delete init_process_group(...): several ranks have their process group when the "
            "function begins, one needs none (destroy_process_group() may go, too)"
        )
    return None


def _about_arguments(error: SystemExit) -> str | None:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if not any(file.endswith("argparse.py") for file in files):
        return None
    return (
        "argparse read the arguments that the notebook's own process was started with: "
        "parser.parse_args([]) takes the defaults; settings come with config"
    )
