"""Let code that was written for torchrun find its variables and its process group in a rank."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.variables import temporary_variables
from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from nbtoolkit.worker.context import RunContext

_GLOO_RELEASE_SECONDS = 0.1


@contextmanager
def torchrun_conditions(ctx: RunContext) -> Iterator[None]:
    """Inside the block, run code for torchrun on any number of ranks, also on one.

    ``init_process_group`` accepts the ranks' group, which ``destroy_process_group`` leaves to the
    end of the rank. A single rank has the variables of torchrun, and gets a group of one when code
    asks for the default group: by ``DistributedSampler(data)``, ``DistributedDataParallel(model)``
    or a collective.

    Raises:
        PlanError: ``init_process_group`` asks for another group than the ranks have.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    alone = ctx.world_size == 1
    with ExitStack() as stack:
        if alone and not dist.is_initialized():  # a kernel may have a group of its own
            stack.callback(leave_group)
        if alone and "RANK" not in os.environ:  # torchrun --nproc-per-node=1 sets it
            stack.enter_context(_variables_of_one(ctx.local_rank))
        init = _accepting(c10d.init_process_group, alone=alone)
        _replace(stack, "init_process_group", init)
        _replace(stack, "destroy_process_group", _leaving(c10d.destroy_process_group))
        _replace(stack, "get_rank", _noting(c10d.get_rank, ctx))
        if alone:
            backend = "gloo" if ctx.plan.device_type == "cpu" else "cpu:gloo,cuda:nccl"
            form = _forming(c10d._get_default_group, partial(init, backend))
            _replace(stack, "_get_default_group", form)
        yield


@contextmanager
def _variables_of_one(local_rank: int) -> Iterator[None]:
    """Set torchrun's variables for a single rank.

    accelerate does not see them: with LOCAL_RANK it would wrap models in DDP, also for one process.
    """
    from accelerate import PartialState

    variables = {
        "RANK": "0",
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # a free port
    }
    init = PartialState.__init__

    @wraps(init)
    def init_without_variables(state: object, *args: Any, **options: Any) -> None:
        rest = {name: value for name, value in os.environ.items() if name not in variables}
        with temporary_variables(rest):
            init(state, *args, **options)

    with temporary_variables({**os.environ, **variables}):
        PartialState.__init__ = init_without_variables
        try:
            yield
        finally:
            PartialState.__init__ = init


def leave_group() -> None:
    """Destroy the default process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        # A gloo thread may still hold the last collective's tensor and needs the interpreter's lock
        # to free it; destroy_process_group waits for that thread with the lock held (torch 2.6).
        time.sleep(_GLOO_RELEASE_SECONDS)
        dist.destroy_process_group()


def _replace(stack: ExitStack, name: str, function: object) -> None:
    """Replace a function of torch.distributed wherever torch itself has imported it."""
    import torch.distributed
    from torch.nn.parallel import distributed

    for module in (torch.distributed, torch.distributed.distributed_c10d, distributed):
        if hasattr(module, name):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)


def _accepting(init: Callable[..., None], *, alone: bool) -> Callable[..., None]:
    """``init_process_group`` that accepts the group which exists, if its arguments agree.

    Args:
        init: torch's function.
        alone: whether this is the only rank; its group needs no address.
    """

    @wraps(init)
    def accepting(*args: Any, **options: Any) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import HashStore

        arguments = inspect.signature(init).bind(*args, **options).arguments
        if dist.is_initialized():
            _check_agrees(arguments)
            return
        if alone and arguments.get("world_size", -1) in (-1, 1):
            # torch's own store would listen on a port that other machines can reach.
            store = arguments.get("store") or HashStore()
            arguments |= {"init_method": None, "store": store, "rank": 0, "world_size": 1}
        init(**arguments)

    return accepting


def _leaving(destroy: Callable[..., None]) -> Callable[..., None]:
    """``destroy_process_group`` that keeps the default group, which later trials need."""

    @wraps(destroy)
    def leaving(group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    return leaving


def _forming(get: Callable[[], ProcessGroup], form: Callable[[], None]) -> Callable[..., object]:
    """``_get_default_group`` that forms the group of one if there is none.

    Not formed in advance: that takes 4 to 15 ms, and libraries such as torchmetrics run collectives
    wherever there is a group.
    """

    def forming() -> ProcessGroup:
        import torch.distributed as dist

        if not dist.is_initialized():
            form()
        return get()

    return forming


def _noting(get: Callable[..., int], ctx: RunContext) -> Callable[..., int]:
    """``get_rank`` that notes a call of the user's code, which may divide the samples by it."""

    @wraps(get)
    def noting(*args: Any, **options: Any) -> int:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] not in ("torch", "accelerate", "nbtoolkit"):
            ctx.divides_samples()
        return get(*args, **options)

    return noting


def _check_agrees(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of ``init_process_group`` against the group that exists.

    Raises:
        PlanError: they name another backend, world size or rank.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Backend, BackendConfig, get_backend_config

    exists = {
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
    }
    # None and -1 name no value.
    asked = {name: arguments.get(name) for name in exists if arguments.get(name) not in (None, -1)}
    different = {name for name in asked if name != "backend" and asked[name] != exists[name]}
    if "backend" in asked:
        wanted = BackendConfig(Backend(str(asked["backend"]))).get_device_backend_map()
        has = BackendConfig(Backend(get_backend_config())).get_device_backend_map()
        if not wanted.items() <= has.items():
            different.add("backend")
    if different:
        raise PlanError(
            f"init_process_group({_text(asked)}) asks for another process group than the ranks of "
            f"this run have: {_text(exists)}",
            allowed="the values of the group that exists, or none",
            do=f"leave out {', '.join(sorted(different))}: init_process_group() then uses the "
            "group that nb.launch has formed",
        )


def _text(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
