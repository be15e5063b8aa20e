"""GPUs in a simulated program: ``torch.cuda`` tells of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of a function that has nothing to do in a simulation."""


def _giving(value: Callable[[], Any]) -> Callable[..., Any]:
    def give(*args: Any, **kwargs: Any) -> Any:
        return value()

    return give


def pretend_gpus(count: int, memory: Any) -> None:
    """Make ``torch.cuda`` report GPUs in this process, which runs only one simulation.

    Args:
        count: the count of the host.
        memory: has ``memory`` and ``peak``, in bytes.
    """
    cuda: Any = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "init",
                 "reset_peak_memory_stats", "ipc_collect"):  # fmt: skip
        setattr(cuda, name, do_nothing)
    cuda.is_available = cuda.is_bf16_supported = _giving(lambda: True)
    cuda.device_count = _giving(lambda: count)
    cuda.current_device = _giving(lambda: 0)
    cuda.memory_allocated = cuda.memory_reserved = _giving(lambda: memory.memory)
    cuda.max_memory_allocated = cuda.max_memory_reserved = _giving(lambda: memory.peak)
    amp: Any = torch.amp
    plain = amp.autocast

    class autocast(plain):
        """Casts on the CPU what the program casts on its GPU."""

        def __init__(self, device_type: str, dtype: Any = None, **others: Any) -> None:
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or torch.float16
            plain.__init__(self, device_type, dtype=dtype, **others)

    spaces: list[Any] = [torch, amp, amp.autocast_mode]
    for space in spaces:
        space.autocast = autocast
