"""Which GPUs there are, without touching CUDA: a process that has must not fork."""

from __future__ import annotations

import os
from functools import cache


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    return [str(index) for index in range(_count())]


@cache
def _count() -> int:
    if not os.path.exists("/proc/driver/nvidia"):
        return 0
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        # No driver, or no library: then no rank is given a GPU, and CUDA sees what it sees.
        return 0
