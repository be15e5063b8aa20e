"""The environment that a zygote is started with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# What is above the package, for the zygote to find it in.
_ROOT = Path(__file__).resolve().parents[3]


def environment(changes: Mapping[str, str | None]) -> tuple[dict[str, str], dict[str, str | None]]:
    """The environment of a zygote, and what it has to restore when its imports are done."""
    # Large tensors in huge pages, where the system has these: other processes read such memory twice as fast.
    wanted = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ, **changes}
    ours: dict[str, str] = {}
    # numpy's BLAS starts its threads when it is loaded, and a fork would not have them.
    if wanted.get("OPENBLAS_NUM_THREADS") is None:
        ours["OPENBLAS_NUM_THREADS"] = "1"
    if _ROOT.name not in ("site-packages", "dist-packages"):
        path = wanted.get("PYTHONPATH")
        ours["PYTHONPATH"] = f"{path}{os.pathsep}{_ROOT}" if path else str(_ROOT)
    environ = {key: value for key, value in {**wanted, **ours}.items() if value is not None}
    return environ, {key: wanted.get(key) for key in ours}
