"""Advice on errors of code that was written for torchrun, for a shell or for the CPU."""

from __future__ import annotations

import traceback

from nbtoolkit.run.serialization import error_text

_TORCHRUN_VARIABLES = {
    "RANK": "ctx.rank",
    "LOCAL_RANK": "ctx.local_rank",
    "WORLD_SIZE": "ctx.world_size",
    "MASTER_ADDR": "nothing: the ranks are connected",
    "MASTER_PORT": "nothing: the ranks are connected",
}
_GROUP_ERRORS = ("initialize the default process group twice", "environment variable RANK expected")
_DEVICE_ERRORS = ("Expected all tensors to be on the same device", "weight type (torch.cuda.")


def advice(error: BaseException) -> str | None:
    """What to change in code that was written for torchrun, a shell or the CPU; None: other errors.

    Args:
        error: raised by a training function.
    """
    if isinstance(error, SystemExit):
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if any(file.endswith("argparse.py") for file in files):
            return (
                "argparse has read the arguments of the notebook's own process: "
                "parser.parse_args([]) uses the defaults; settings come with config"
            )
        return None
    name = next(iter(error.args), None) if isinstance(error, KeyError) else None
    if isinstance(name, str) and name in _TORCHRUN_VARIABLES:  # the key may not be hashable
        return (
            f"torchrun sets os.environ[{name!r}], and a single process does not have it: use "
            f"{_TORCHRUN_VARIABLES[name]} instead"
        )
    text = error_text(error)
    if "process group has not been initialized" in text:
        return (
            "a single process has no process group and needs none: ctx.rank and ctx.world_size are "
            "always there (DistributedSampler(data, ctx.world_size, ctx.rank)), ctx.prepare wraps "
            "the model, ctx.accelerator.reduce and .gather also work on one process"
        )
    if any(part in text for part in _GROUP_ERRORS):
        return (
            "delete init_process_group(...): several ranks have a process group when the function "
            "starts, a single one needs none (delete destroy_process_group(), too)"
        )
    if any(part in text for part in _DEVICE_ERRORS):
        return (
            "a tensor that the function or its loss uses is still on the CPU: move it with "
            ".to(ctx.device), or .to(outputs.device) in a loss; nb.fit moves only the tensors of "
            "a model, of a batch, and of a loss that is a module or a partial"
        )
    return None
