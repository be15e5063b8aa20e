"""Memory of this very process: a plain copy."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from monarch._tensors.memory import Memory, copy_memory
from monarch._tensors.registry import Registry, Remote
from monarch._tensors.transport import Move, dropped

_SHARED_OUT = 4 << 20
_THREADS = 4


class SameProcess:
    """The transport between two pieces of this process's memory, of any devices."""

    name = "local"

    def __init__(self, proc: str, registry: Registry) -> None:
        self._proc = proc
        self._registry = registry

    def reason_against(self, remote: Remote, local_device: str) -> str:
        return "" if remote.proc == self._proc else "the owner is another process"

    def forget(self, proc: str) -> None:
        pass

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        pairs: list[tuple[Memory, Memory]] = []
        for remote, local in moves:
            memory = self._registry.get(remote.key)
            if memory is None:
                raise dropped(remote)
            theirs = memory.part(remote.offset, local.size)
            pairs.append((theirs, local) if writing else (local, theirs))
        for (remote, _), (to, source) in zip(moves, pairs, strict=True):
            if to.device == source.device == "cpu":
                _copy(to.address, source.address, to.size)
            else:
                _copy_by_torch(to, source, remote, writing)


def _copy_by_torch(to: Memory, source: Memory, remote: Remote, writing: bool) -> None:
    """Between devices: of the memory that is shared only the part that is meant."""
    mine, theirs = (to, source) if not writing else (source, to)
    whole = theirs.keep if isinstance(theirs.keep, torch.Tensor) else torch.frombuffer(theirs.keep, dtype=torch.uint8)
    shared = whole.view(torch.uint8)[remote.offset : remote.offset + mine.size]
    own = mine.keep if isinstance(mine.keep, torch.Tensor) else torch.frombuffer(mine.keep, dtype=torch.uint8)
    local = own.view(torch.uint8)[: mine.size]
    if writing:
        shared.copy_(local)
    else:
        local.copy_(shared)
    torch.cuda.synchronize()


def _copy(to: int, source: int, size: int) -> None:
    workers = min(_THREADS, len(os.sched_getaffinity(0)))
    if size < _SHARED_OUT or workers == 1 or abs(to - source) < size:
        copy_memory(to, source, size)
        return
    step = -(-size // workers)
    others = [
        threading.Thread(
            target=copy_memory,
            args=(to + start, source + start, min(step, size - start)),
            name="monarch-copy",
            daemon=True,
        )
        for start in range(step, size, step)
    ]
    for other in others:
        other.start()
    copy_memory(to, source, step)
    for other in others:
        other.join()
