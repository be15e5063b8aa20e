"""Memory of this very process: a plain copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monarch._procs.os.helpers import as_helper, be_helper, helper_cores
from monarch._python.threads import new_thread
from monarch._tensors.memory.registry import MemoryReference, Registry
from monarch._tensors.memory.views import Memory, bytes_of, copy_memory
from monarch._tensors.transports.base import Move, dropped

_SHARED_OUT = 4 << 20
_THREADS = 4


class SameProcess:
    """The transport between two pieces of this process's memory, of any devices."""

    name = "local"

    def __init__(self, proc: str, registry: Registry) -> None:
        self._proc = proc
        self._memories = registry

    def reason_against(self, remote: MemoryReference, local_device: str) -> str:
        return "" if remote.proc == self._proc else "the owner is another process"

    def forget(self, proc: str) -> None:
        pass

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        theirs: list[Memory] = []
        for remote, _, _ in moves:
            memory = self._memories.get(remote.key)
            if memory is None:
                raise dropped(remote)
            theirs.append(memory)
        for move, memory in zip(moves, theirs, strict=True):
            remote, local = move.remote, move.local
            cpu = local.device == memory.device == "cpu"
            for there, here, size in move.rows.tolist():
                shared, mine = memory.part(remote.offset + there, size), local.part(here, size)
                to, source = (shared, mine) if writing else (mine, shared)
                if cpu:
                    _copy(to.address, source.address, size)
                else:
                    bytes_of(to).copy_(bytes_of(source))
            if not cpu:
                # Of the GPU, which may not be the current one of this thread.
                torch.cuda.current_stream(local.device if local.device != "cpu" else memory.device).synchronize()


def _copy_as_helper(to: int, source: int, size: int) -> None:
    be_helper()
    copy_memory(to, source, size)


def _copy(to: int, source: int, size: int) -> None:
    workers = min(_THREADS, helper_cores())
    if size < _SHARED_OUT or workers == 1 or abs(to - source) < size:
        copy_memory(to, source, size)
        return
    step = -(-size // workers)
    others = [
        new_thread("monarch-copy", _copy_as_helper, to + start, source + start, min(step, size - start))
        for start in range(step, size, step)
    ]
    for other in others:
        other.start()
    with as_helper():
        copy_memory(to, source, step)
    for other in others:
        other.join()
