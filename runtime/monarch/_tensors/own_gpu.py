"""The GPU of a rank: CUDA starts with it as the current device, in whichever thread, and groups know it by name.

A rank sees all GPUs that its mesh may use, those of the mesh first; its own has the number LOCAL_RANK among them, or
that modulo their count. Until a program uses CUDA, nothing here touches it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from monarch._procs.os.gpus import visible_gpus
from monarch._tensors.torch_compat import before_cuda


class _Thread(threading.local):
    """Whether the current device of this thread has been set."""

    chosen = False


class OwnGpu:
    """The GPU of this process. Every method is for any thread.

    Args:
        local_rank: returns the number of this rank on its host.
    """

    def __init__(self, local_rank: Callable[[], int]) -> None:
        self._local_rank = local_rank
        self._thread = _Thread()
        self._noted: int | None = None
        """The current device of the last thread that asked for a group. One atomic write; the last one counts."""
        self._wanted = False
        """Whether the program has asked for NCCL. Only ever set."""

    def number(self) -> int:
        """Return its number among the visible GPUs."""
        return self._local_rank() % max(1, torch.cuda.device_count())

    def use(self) -> None:
        """Make it the current device of this thread, once."""
        self._thread.chosen = True
        if torch.cuda.device_count():
            torch.cuda.set_device(self.number())

    def use_if_begun(self) -> None:
        """Call ``use`` if the program has begun to use CUDA."""
        if not self._thread.chosen and torch.cuda.is_initialized():
            self.use()

    def note(self) -> None:
        """Note the current device of this thread, which the program may have chosen itself, for its groups."""
        if torch.cuda.is_initialized():
            self._noted = torch.cuda.current_device()

    def want(self) -> None:
        """Note that the program will use it, though it may not have begun."""
        self._wanted = True

    def is_used(self) -> bool:
        """Return whether the program uses it, or has said that it will."""
        return torch.cuda.is_initialized() or self._wanted

    def of_groups(self) -> int:
        """Return the number of the GPU whose tensors the collectives of this process have."""
        return self.number() if self._noted is None else self._noted

    def name(self) -> str:
        """Return a name that is unique among hosts, as in ``Place.device``."""
        if not torch.cuda.is_available():
            return "cpu"
        number, names = self.of_groups(), visible_gpus()
        # NCCL tells hosts apart by this variable where it is set.
        host = os.environ.get("NCCL_HOSTID") or os.uname().nodename
        return f"cuda {host} {names[number] if number < len(names) else number}"


_lock = threading.Lock()
_own: OwnGpu | None = None
"""Set once, under the lock."""


def own_gpu(local_rank: Callable[[], int]) -> OwnGpu:
    """Return the GPU of this rank; the first call lets CUDA begin with it."""
    global _own
    with _lock:
        gpu, is_new = _own or OwnGpu(local_rank), _own is None
        _own = gpu
    if is_new:
        before_cuda(gpu.use)
    return gpu


def known_gpu() -> OwnGpu | None:
    """Return the GPU of this rank if ``own_gpu`` was called before."""
    return _own
