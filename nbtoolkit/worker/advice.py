"""Advice on errors of code that was written for torchrun, for a shell or for the CPU."""

from __future__ import annotations

import traceback

from nbtoolkit.run.serialization import error_text

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
    text = error_text(error)
    if "initialize the default process group twice" in text:
        # A name that was imported before the run began is torch's own function.
        return (
            "several ranks have a process group when the function starts: call "
            "torch.distributed.init_process_group(...) by this name, which accepts the group, or "
            "only if not torch.distributed.is_initialized()"
        )
    if any(part in text for part in _DEVICE_ERRORS):
        return (
            "a tensor that the function or its loss uses is still on the CPU: move it with "
            ".to(ctx.device), or .to(outputs.device) in a loss; nb.fit moves only the tensors of "
            "a model, of a batch, and of a loss that is a module or a partial"
        )
    return None
