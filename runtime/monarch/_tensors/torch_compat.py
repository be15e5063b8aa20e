"""Every private name of torch that the package uses, except those of ``_wire/tensor_compat.py``.

Nothing of torch is imported before a function needs it: rank processes import this file before torch. Tests call each
function, so a torch version without one of the names fails there and not in a training run.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

from monarch._core.frames import caller

_C10D = "torch.distributed.distributed_c10d"
_MAKER = "_new_process_group_helper"
"""The function that creates each group: ``init_process_group``, ``new_group`` and DeviceMesh call it."""


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d


def group_names() -> list[tuple[Any, str]]:
    """Return the process groups of this process with their names."""
    return list(_c10d()._world.pg_names.items())


def groups() -> list[Any]:
    """Return the process groups of this process."""
    return list(_c10d()._world.pg_map)


def begun(group: Any) -> int:
    """Return how many collectives this process has begun in a group.

    Raises:
        RuntimeError: the backend of the group does not count.
    """
    return int(group._get_sequence_number_for_group())


def backend_of(group: Any, device: str) -> Any:
    """Return the backend of a group for a type of device; None if it has none."""
    import torch

    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def make_group(
    members: Sequence[int], rank: int, backend: str, store: Any, name: str, timeout: datetime.timedelta
) -> Any:
    """Create a process group of some ranks of the default one, like ``dist.new_group``, under a given name.

    Args:
        members: ranks in the default group.
        rank: that of this process, one of them.
        backend: as ``dist.new_group`` takes it.
        store: for the rendezvous of the members.
        name: the same on all members.
        timeout: of its collectives.
    """
    c10d = _c10d()
    group, _ = c10d._new_process_group_helper(
        len(members), members.index(rank), members, c10d.Backend(backend), store, cast("Any", name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    return group


def wrap_group_maker(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace the function that creates each process group by ``wrap`` of it, once.

    Returns:
        Whether it is replaced; False where torch.distributed is not imported yet, or has no such function.
    """
    c10d: Any = sys.modules.get(_C10D)
    make = getattr(c10d, _MAKER, None)
    if make is None:
        return False
    if not hasattr(make, "__wrapped__"):
        setattr(c10d, _MAKER, wrap(make))
    return True


class _Hidden(threading.local):
    """Whether this thread reads the default group without its hook."""

    depth = 0


_hidden = _Hidden()


@contextmanager
def as_it_is() -> Generator[None]:
    """Read the default group without its hook in this thread: this code makes the group, or ends it."""
    _hidden.depth += 1
    try:
        yield
    finally:
        _hidden.depth -= 1


def default_group() -> Any:
    """Return the default process group of this process as it is, without a hook, or None."""
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None:
        return None
    kind = cast("Any", type(c10d._world))
    return getattr(kind, "_unhooked", kind).default_pg.fget(c10d._world)


def hook_default_group(hook: Callable[[Any, FrameType], Any]) -> bool:
    """Ask a function for the default process group whenever Python code reads it, once.

    Every function of torch.distributed reads it there, and so do DDP, FSDP and DeviceMesh, under any name of import.

    Args:
        hook: called with the group as it is, and the frame that reads it; returns the group to read.

    Returns:
        Whether the hook is in place; False where torch.distributed is not imported yet.
    """
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None:
        return False
    plain = cast("Any", type(c10d._world))
    if hasattr(plain, "_unhooked"):
        return True

    def read(world: Any) -> Any:
        if _hidden.depth:
            return plain.default_pg.fget(world)
        # The frames: this function, the property group.WORLD, and the code that reads that.
        return hook(plain.default_pg.fget(world), caller(2))

    def write(world: Any, group: Any) -> None:
        plain.default_pg.fset(world, group)

    c10d._world.__class__ = type("_World", (plain,), {"_unhooked": plain, "default_pg": property(read, write)})
    return True


def wrap_function(name: str, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace a function of torch.distributed by ``wrap`` of it, once, under the names that torch has for it."""
    import torch.distributed as dist
    from torch.distributed import device_mesh

    plain = getattr(_c10d(), name)
    if not hasattr(plain, "monarch"):
        wrapped: Any = wrap(plain)
        wrapped.monarch = True
        for module in (_c10d(), dist, device_mesh):
            if hasattr(module, name):
                setattr(module, name, wrapped)


def uses_default(frame: FrameType | None) -> bool:
    """Return whether the function of torch.distributed that reads the default group in a frame works on it.

    False for a function that was given another group, and for torch's log of an error.
    """
    c10d, folder = _c10d().__file__, os.path.dirname(_c10d().__file__)
    found: FrameType | None = None
    while frame is not None and frame.f_code.co_filename.startswith(folder):
        if frame.f_code.co_name == "_get_msg_dict":
            return False
        found = frame if frame.f_code.co_filename == c10d else found
        frame = frame.f_back
    values = found.f_locals if found is not None else {}
    return all(values.get(name) is None for name in ("group", "pg"))


def is_of_torch(frame: FrameType) -> bool:
    """Return whether torch reads the default group in a frame for itself: as it is imported, for a log or a compiler.

    A group made then would wait for the import, and torch would wait for the group.
    """
    c10d, caller = _c10d().__file__, frame
    while caller.f_code.co_filename == c10d and caller.f_back is not None:
        caller = caller.f_back
    file, folder = caller.f_code.co_filename, os.path.dirname(os.path.dirname(c10d))
    if not file.startswith(folder):
        return False
    uses = tuple(os.path.join(folder, part) for part in ("distributed", os.path.join("nn", "parallel")))
    asks_only = frame.f_code.co_name == "is_initialized" and not file.startswith(uses)
    return asks_only or caller.f_code.co_name == "<module>"


def set_timeout(group: Any, timeout: datetime.timedelta) -> None:
    """Set the timeout of later collectives of a group."""
    _c10d()._set_pg_timeout(timeout, group)


def before_cuda(action: Callable[[], object]) -> None:
    """Call an action in the thread that first uses CUDA, as its first use; now if CUDA is in use already."""
    import torch

    cuda: Any = torch.cuda
    if torch.cuda.is_initialized():
        action()
    else:
        # torch's own function also formats the stack, which reads source files.
        cuda._queued_calls.append((action, []))


def nccl_backends(groups: Iterable[Any]) -> list[Any]:
    """Return the NCCL backends of some process groups, each once."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [backend_of(group, "cuda") for group in groups]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
    plain = [getattr(each, "wrapped_pg", each) for each in found if each is not None]
    return list({id(each): each for each in plain if type(each).__name__ == "ProcessGroupNCCL"}.values())


def abort_together(backends: Sequence[Any]) -> int:
    """Abort NCCL backends; return how many.

    In one NCCL group, as torch does it: aborts of communicators one by one may wait for each other
    (https://github.com/pytorch/pytorch/issues/119797).
    """
    # Versions of torch without it make this wait for the watchdog.
    able = [each for each in backends if hasattr(each, "abort")]
    grouped = able and hasattr(able[0], "_group_start")
    if grouped:
        able[0]._group_start()
    try:
        for each in able:
            each.abort()
    finally:
        if grouped:
            able[0]._group_end()
    return len(able)


def local_box(shape: Iterable[int], mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(cast("Any", shape), mesh, placements)
    return tuple(local), tuple(offset)
