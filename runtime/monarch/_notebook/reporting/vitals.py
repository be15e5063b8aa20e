"""The memory, device and current line of a rank, as a service that answers while it is busy."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from monarch._actors.pausing.gate import gate
from monarch._node.services.registry import service
from monarch._notebook.names.own_names import own_value
from monarch._notebook.reporting.busy import place_of

_PAGE = os.sysconf("SC_PAGESIZE")


class Vitals(NamedTuple):
    """The figures of one process."""

    pid: int
    memory: int
    """Resident bytes."""
    device: str
    gpu_memory: int
    """Bytes that torch holds on its GPU; 0 without one."""
    place: str
    """The innermost line of a cell in the main thread, as in ``cell [3] line 5``, or an empty string."""
    is_paused: bool = False
    """Whether a debugger has paused it."""


@service("vitals.vitals_here", "threaded")
def vitals_here() -> Vitals:
    """Service: return the figures of this process."""
    device, gpu_memory = _device()
    return Vitals(os.getpid(), _resident(), device, gpu_memory, place_of(gate.place()), gate.is_paused())


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def _device() -> tuple[str, int]:
    """Return the device of the cells, and the GPU memory in use. No CUDA context is made for this."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return f"cuda:{cuda.current_device()}", int(cuda.memory_reserved())
    # Not the variable, which cells may have replaced by any object.
    return str(own_value("device") or ""), 0
