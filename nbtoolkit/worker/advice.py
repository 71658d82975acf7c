"""Advice on errors of code that was written for torchrun, a shell, the CPU or a larger machine."""

from __future__ import annotations

import shutil
import traceback

from nbtoolkit.environment.resources import size_text
from nbtoolkit.wire.serialization import error_text

# torch's, when it passes a batch from a worker to the rank, and when such a worker dies of it.
_SHARED_MEMORY_ERRORS = (
    "unable to allocate shared memory",
    "unable to write to file </torch_",
    "unable to mmap",
    "are out of shared memory",
    "No space left on device: '/dev/shm",
)
_UNUSED_ERROR = "Expected to have finished reduction in the prior iteration"
_DEVICE_ERRORS = ("Expected all tensors to be on the same device", "weight type (torch.cuda.")


def advice(error: BaseException) -> str | None:
    """Return what to change in code that was written for other circumstances; None: other errors.

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
    if any(part in text for part in _SHARED_MEMORY_ERRORS):
        return (
            f"/dev/shm is full: it has {size_text(shutil.disk_usage('/dev/shm').total)}, and the "
            "workers of a DataLoader pass their batches through it: start the container with "
            "--shm-size=8g (or --ipc=host), or use no workers (train.num_workers: 0; in an own "
            "loop DataLoader(..., num_workers=0))"
        )
    if _UNUSED_ERROR in text:
        return (
            "a training step did not use all parameters of a prepared model: set "
            "distributed.find_unused_parameters: true (slower), or freeze the others with "
            "requires_grad_(False)"
        )
    if any(part in text for part in _DEVICE_ERRORS):
        return (
            "a tensor that the function or its loss uses is still on the CPU: move it with "
            ".to(ctx.device), or .to(outputs.device) in a loss; nb.fit moves only the tensors of "
            "a model, of a batch, and of a loss that is a module or a partial"
        )
    return None
