"""The initial environment of a zygote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# The folder of the package, for the zygote to import it.
_ROOT = Path(__file__).resolve().parents[3]


def environment(changes: Mapping[str, str | None]) -> tuple[dict[str, str], dict[str, str | None]]:
    """Return the environment of a zygote, and the values to restore after its imports."""
    # Large tensors in huge pages, if available: other processes read such memory twice as fast.
    wanted = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ, **changes}
    additions: dict[str, str] = {}
    # numpy's BLAS starts its threads when loaded, and a fork would not have them.
    if wanted.get("OPENBLAS_NUM_THREADS") is None:
        additions["OPENBLAS_NUM_THREADS"] = "1"
    if _ROOT.name not in ("site-packages", "dist-packages"):
        path = wanted.get("PYTHONPATH")
        additions["PYTHONPATH"] = f"{path}{os.pathsep}{_ROOT}" if path else str(_ROOT)
    environ = {key: value for key, value in {**wanted, **additions}.items() if value is not None}
    return environ, {key: wanted.get(key) for key in additions}
