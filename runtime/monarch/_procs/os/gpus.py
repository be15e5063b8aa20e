"""The GPUs of this machine, found without touching CUDA: a process that uses CUDA must not fork."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
"""One exists where NVIDIA's driver is; some containers have the second only, and WSL 2 the third."""


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the GPUs that this process may use, or one with another environment, as in
    CUDA_VISIBLE_DEVICES."""
    chosen = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    return [str(index) for index in range(_count())]


def has_touched_gpus(pid: int | str = "self") -> bool:
    """Return whether a process has GPUs open, as after any CUDA query: its forks cannot use them."""
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with suppress(OSError):
            if os.readlink(f"{folder}/{fd}").startswith("/dev/nvidia"):
                return True
    return False


@cache
def _count() -> int:
    if not any(map(os.path.exists, _DRIVERS)):
        return 0
    try:
        # Optional, and has no types.
        import pynvml  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        # No driver, or no library: then ranks are not assigned GPUs, and CUDA sees all.
        return 0
