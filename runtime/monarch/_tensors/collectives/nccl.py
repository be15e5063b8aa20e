"""NCCL in the process groups of a rank: connected when a group is made, and aborted to free who waits in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from monarch._core.diagnosis.facts import Entered
from monarch._python.threads import new_thread
from monarch._tensors.collectives.connections import end_listening, open_sockets
from monarch._tensors.collectives.waiting import labels
from monarch._tensors.torch_compat import (
    backend_of,
    begun,
    default_group,
    discard_group,
    group_names,
    groups,
)
from monarch._wire.receiving.aside import tell

ABORT_S = 10.0
"""Seconds to wait for aborts before their groups are destroyed."""
_aborting: dict[int, threading.Thread] = {}
"""The threads that abort a backend, by its id. Any thread, in single operations."""
_connecting: dict[int, set[tuple[int, int]]] = {}
"""By thread, the sockets from before the group that it connects now. Any thread, in single operations."""


def nccl_backends(groups: Iterable[Any]) -> list[Any]:
    """Return the NCCL backends of some process groups, each once."""
    if not torch.cuda.is_available():
        return []
    found = [backend_of(group, "cuda") for group in groups]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
    plain = [getattr(each, "wrapped_pg", each) for each in found if each is not None]
    return list({id(each): each for each in plain if type(each).__name__ == "ProcessGroupNCCL"}.values())


def connect_at_once(group: Any, gpu: int) -> None:
    """Let the NCCL backends of a new process group connect to the other members, which all do the same now.

    Otherwise the first collective does, and it can only be ended with its process: an abort waits for it.

    Args:
        group: the group of this process; a placeholder where this process is not a member.
        gpu: number of the GPU whose tensors the collectives will have.

    Raises:
        RuntimeError: NCCL could not, or its connections were cut.
    """
    if not isinstance(group, dist.ProcessGroup):
        return
    _connecting[threading.get_ident()] = open_sockets()
    try:
        for each in nccl_backends([group]):
            if hasattr(each, "eager_connect_single_device"):
                each.eager_connect_single_device(torch.device("cuda", gpu))
    except BaseException:
        discard_group(group)
        raise
    finally:
        del _connecting[threading.get_ident()]


def free_connecting() -> int:
    """Free the threads that connect to members that do not come; return how many sockets were shut down.

    They accept connections, and look at nothing else: an abort would wait for them.
    """
    return sum(end_listening(open_sockets() - each) for each in list(_connecting.values()))


def begun_by_all() -> int:
    """Return how many collectives this process has begun in all of its groups."""
    count = 0
    for group in groups():
        # It may be in the moment when it is made or destroyed.
        with suppress(RuntimeError, KeyError, ValueError):
            count += begun(group)
    return count


def issued() -> list[Entered]:
    """Return the last collective that this process has issued in each group of NCCL."""
    found: list[Entered] = []
    for group, name in group_names():
        # It may be in the moment when it is made or destroyed.
        with suppress(RuntimeError, KeyError, ValueError):
            if nccl_backends([group]):
                members = tuple(dist.get_process_group_ranks(group))
                is_default = group is default_group()
                found.append(Entered("", name, members, is_default, begun(group), label=labels().get(name, "")))
    return found


def abort_nccl() -> int:
    """Begin to abort the NCCL groups of this process, each in its own thread; return how many.

    An abort frees memory of the GPU, which waits for all kernels. One after another, that of an idle group would wait
    for the collective of a group whose turn comes later (https://github.com/NVIDIA/nccl/pull/564).
    """
    # Versions of torch without it make this wait for the watchdog.
    found = [each for each in nccl_backends(groups()) if hasattr(each, "abort")]
    for each in found:
        thread = new_thread("monarch-abort", _abort, each)
        if _aborting.setdefault(id(each), thread) is thread:
            try:
                thread.start()
            except RuntimeError:
                # There is no room for a thread.
                _abort(each)
    return len(found)


def await_aborts(seconds: float) -> bool:
    """Wait until the aborts that have begun are done; return False if any is not after so many seconds."""
    until = time.monotonic() + seconds
    for each in list(_aborting.values()):
        # Another thread may have noted it, and is about to start it.
        with suppress(RuntimeError):
            each.join(max(0.0, until - time.monotonic()))
    return not _aborting


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:
        tell(f"monarch: aborting an NCCL process group failed: {type(error).__name__}: {error}")
    finally:
        _aborting.pop(id(backend), None)
