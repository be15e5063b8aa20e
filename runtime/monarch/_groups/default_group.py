"""The default process group of a rank: made when code first asks for it, under whatever name.

``import torch.distributed as dist``, DDP, ``fully_shard``, ``init_device_mesh`` and libraries all read torch's default
group in one place, where it is made now. ``init_process_group`` adopts it. A program that makes a group of its own, or
that runs as under torchrun, is left alone.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from monarch._actors.running import current
from monarch._groups.aborting import begin_ending_calls
from monarch._groups.breaking import begin_ending_left_groups, retire_elsewhere
from monarch._groups.convening import ensure_world
from monarch._groups.environment import rank_gpu
from monarch._groups.rendezvous import local_rendezvous
from monarch._groups.renewing import begin_renewing
from monarch._groups.timeouts import begin_watching_timeouts, watch_timeout
from monarch._node.current import current_node
from monarch._python.threads import is_own
from monarch._tensors.torch_compat import (
    as_it_is,
    default_group,
    hook_default_group,
    is_of_torch,
    only_asks,
    set_timeout,
    uses_default,
    wrap_function,
)
from monarch._wire.receiving.aside import tell
from monarch.exceptions import GroupError

_BACKENDS = {None, "gloo", "nccl", "cpu:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"}
"""The backends that the group of a mesh can stand for."""
_TRIES = 5
"""How often to ask for the default group, since a newer generation may replace it at once."""

_programs = 0
"""Programs that run as under torchrun and make their own group. Written by the thread that runs them, one at a time."""
_rank = 0
"""The process that has the hook, since its forks have no part in the mesh."""


def hook_torch() -> None:
    """Make torch's default group on demand, in a rank; does nothing until torch.distributed is imported."""
    global _rank
    _rank = os.getpid()
    if hook_default_group(_on_read):
        wrap_function("init_process_group", _adopting)
        wrap_function("destroy_process_group", _ending)
        rank_gpu()
        begin_renewing()
        begin_ending_calls()
        begin_watching_timeouts()
        begin_ending_left_groups()


@contextmanager
def own_group() -> Generator[None]:
    """Leave torch's default group to the program that runs meanwhile."""
    global _programs
    _programs += 1
    try:
        yield
    finally:
        _programs -= 1


def _on_read(group: Any, reader: FrameType) -> Any:
    """Return the default group for code that reads it: the mesh's, made now if none works, or the code's own."""
    if not _makes_here() or (group is not None and not _is_due(reader)) or is_of_torch(reader):
        return group
    try:
        return _made()
    except GroupError:
        if only_asks(reader):
            return None
        raise


def _made() -> Any:
    """Return the default group, made now if none works."""
    for _ in range(_TRIES):
        ensure_world()
        found = default_group()
        if found is not None:
            return found
        # A newer generation has begun since, and this rank has left the one that it waited for.
    raise GroupError(f"the process group was replaced {_TRIES} times while this code requested it; try again")


def _is_due(reader: FrameType) -> bool:
    """Return whether code that reads an existing default group first needs a look at it, or a new one."""
    own, here = local_rendezvous(), current.get()
    if not own.has_default or (here is not None and own.is_used_by(here[1].src, here[1].port)):
        return False
    # An operation that has failed, or has another group, continues with the broken one.
    return not own.broken or (reader.f_code.co_name != "is_initialized" and uses_default(reader))


def _makes_here() -> bool:
    """Return whether the code of this thread may make the group."""
    if _programs or _rank != os.getpid():
        return False
    node = current_node()
    if node.config is None or node.receive_loop.receives_here():
        return False
    # Threads of this package make none, and do not wait for one.
    return current.get() is not None or not is_own(threading.current_thread())


def _adopting(make: Callable[..., None]) -> Callable[..., None]:
    """Return ``init_process_group`` that adopts the group of the mesh where it stands for the one asked for."""

    @functools.wraps(make)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **named: Any,
    ) -> None:
        store = args[0] if args else named.get("store")
        own = local_rendezvous() if _makes_here() else None
        if own is not None and (own.has_default or default_group() is None):
            if store is None and _is_of_mesh(backend, init_method, world_size, rank):
                if "nccl" in str(backend).lower():
                    rank_gpu().want()
                ensure_world()
                if timeout is not None:
                    set_timeout(default_group(), timeout)
                    watch_timeout(default_group())
                _note_backend(backend)
                return
            own.leave()
            retire_elsewhere(own.generation)
        with as_it_is():
            make(backend, init_method, timeout, world_size, rank, *args, **named)

    return init_process_group


def _ending(end: Callable[..., None]) -> Callable[..., None]:
    """Return ``destroy_process_group`` that tells the other ranks if it ends the group of the mesh."""

    @functools.wraps(end)
    def destroy_process_group(group: Any = None) -> None:
        own = local_rendezvous()
        ends = _makes_here() and own.has_default and default_group() is not None and group in (None, default_group())
        with as_it_is():
            end(group)
        if ends:
            own.leave()
            retire_elsewhere(own.generation)

    return destroy_process_group


def _is_of_mesh(backend: str | None, init_method: str | None, world_size: int, rank: int) -> bool:
    """Return whether a process group with these arguments has the ranks of the mesh."""
    size, own = local_rendezvous().procs().region().nelements, current_node().rank
    sizes, ranks = {-1, size}, {-1, own}
    variables = os.environ.get("WORLD_SIZE", str(size)) == str(size) and os.environ.get("RANK", str(own)) == str(own)
    known = backend is None or str(backend).lower() in _BACKENDS
    return known and init_method in (None, "env://") and world_size in sizes and rank in ranks and variables


def _note_backend(backend: str | None) -> None:
    """Tell if the group of the mesh has another backend than the one asked for."""
    import torch.distributed as dist

    with as_it_is():
        found = dist.get_backend_config()
    if backend is not None and "nccl" in str(backend).lower() and "nccl" not in found:
        tell(f"monarch: init_process_group({backend!r}): the ranks have no GPUs of their own, so the group uses gloo")
