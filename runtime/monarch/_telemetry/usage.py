"""CPU, memory and GPU usage of this process."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any

from monarch._core.telemetry.events import ResourceUsage

_PAGE = os.sysconf("SC_PAGESIZE")
CPU, _RSS, _LOAD = 0.05, 0.01, 0.05
"""Changes that are reported: cores, the share of resident bytes, the share of a GPU."""


class UsageReader:
    """Reads the usage. One thread at a time."""

    def __init__(self) -> None:
        self._when = time.monotonic()
        self._used = time.process_time()

    def read(self, gpu: tuple[int, float]) -> ResourceUsage:
        """Return the usage, with the CPU time since the last call.

        Args:
            gpu: bytes and utilization of the GPU.
        """
        now, used = time.monotonic(), time.process_time()
        seconds = now - self._when
        cpu = (used - self._used) / seconds if seconds > 0 else 0.0
        self._when, self._used = now, used
        return ResourceUsage(round(cpu, 2), _resident(), *gpu)


def differ(one: ResourceUsage, other: ResourceUsage) -> bool:
    """Return whether usage differs enough from an earlier one to be reported."""
    return (
        abs(one.cpu - other.cpu) >= CPU
        or (other.cpu > 0 and not one.cpu)
        or abs(one.rss - other.rss) > _RSS * max(one.rss, other.rss)
        or abs(one.gpu_memory - other.gpu_memory) > _RSS * max(one.gpu_memory, other.gpu_memory)
        or abs(one.gpu_load - other.gpu_load) >= _LOAD
    )


def _resident() -> int:
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def device_of(variables: dict[str, Any]) -> str:
    """Return the device of a rank: of its GPU once it uses CUDA, else that of its cells. Initializes no CUDA."""
    cuda = used_cuda()
    if cuda is not None:
        return f"cuda:{cuda.current_device()}"
    device = variables.get("device")
    torch: Any = sys.modules.get("torch")
    return str(device) if torch is not None and type(device) is torch.device else ""


def used_cuda() -> Any:
    """Return torch.cuda if the program has begun to use it, else None."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


class Gpu:
    """Reads the GPU of this process through NVML, which takes milliseconds at first. One thread at a time."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._failed = False

    def read(self) -> tuple[int, float]:
        """Return the bytes that this process holds on its GPU, and the utilization of the GPU; -1 if it is unknown."""
        cuda = used_cuda()
        if cuda is None:
            return 0, -1.0
        memory = int(cuda.memory_reserved())
        if self._failed:
            return memory, -1.0
        try:
            if self._handle is None:
                self._open(cuda)
            return memory, self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except Exception:
            # No driver, no permission, or an unusual device, such as a MIG instance: not to be asked again.
            self._failed = True
            return memory, -1.0

    def _open(self, cuda: Any) -> None:
        # It has no types.
        import pynvml  # pyright: ignore[reportMissingTypeStubs]

        pynvml.nvmlInit()
        self._nvml = pynvml
        uuid = str(cuda.get_device_properties(cuda.current_device()).uuid)
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
