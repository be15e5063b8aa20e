"""Rules for attention on CPUs, which torch has for GPUs only: batches and heads are independent of each other."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from monarch._engine.dtensor_compat import cpu_attention

Rules = list[tuple[list[Any], list[Any]]]


@cache
def register_attention() -> None:
    """Add the rules; in the program and on each rank."""
    forward, backward = cpu_attention

    def rules_forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Rules:
        return _rules(2, 3, len(args), kwargs)

    def rules_backward(g: Any, q: Any, k: Any, v: Any, out: Any, log: Any, *args: Any, **kwargs: Any) -> Rules:
        return _rules(3, 6, len(args), kwargs)

    register_sharding(forward)(rules_forward)
    register_sharding(backward)(rules_backward)


def _rules(outputs: int, inputs: int, others: int, kwargs: dict[str, Any]) -> Rules:
    found: Rules = []
    masked = kwargs.get("attn_mask") is not None
    for placement in (Replicate(), Shard(0), Shard(1)):
        # A mask may have one batch or head for all.
        tail = [None] * others + [Replicate() if isinstance(each, torch.Tensor) else None for each in kwargs.values()]
        if masked and not isinstance(placement, Replicate):
            continue
        found.append(([placement] * outputs, [*[placement] * inputs, *tail]))
    return found
