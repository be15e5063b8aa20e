"""The modules that the zygotes of a session import before they fork, so that ranks find them there."""

from __future__ import annotations

from monarch.config import PRELOAD

_LIGHT = [
    "numpy",
    "multiprocessing.resource_tracker",
    "monarch.actor",
    "monarch._session.rank_process",
    "monarch._telemetry.collector",
    "monarch._telemetry.reporter",
]
_TORCH = [
    "torch",
    "monarch._state.checkpoint.api",
    "monarch._state.heal",
    "monarch.distributed",
    "monarch._tensors.collectives.waiting",
    "monarch._tensors.collectives.world",
]
_LATER = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
]
more: list[str] = []
"""Further modules, of the program itself. Set before its first mesh."""


def at_first() -> list[str]:
    """Return the modules that a zygote imports before its first fork."""
    # torch comes first: it takes longest, and others import it.
    return [*(_TORCH[:1] if PRELOAD() != "none" else []), *_LIGHT, *(_TORCH[1:] if PRELOAD() != "none" else []), *more]


def later() -> list[str]:
    """Return the modules of its successor: the first optimizer of a process imports torch._dynamo, about a second."""
    return list(_LATER) if PRELOAD() == "all" else []
