"""Samplers of a notebook that divide data among all ranks of a mesh, whose size has changed."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from typing import Any

from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._notebook.variables.holding import holding
from monarch._notebook.variables.names import names_here
from monarch._python.objects import instances_of


@service("resampled.resample", "threaded")
def resample(before: int, size: int) -> list[str]:
    """Service: let samplers that were made for all ranks divide the data among those of now.

    Args:
        before: how many ranks there were.
        size: how many there are.

    Returns:
        The variables that have them.
    """
    kind: Any = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
    config = current_node().config
    if kind is None or config is None:
        return []
    rank = config.procs.rank_of(current_node().proc)
    # A subclass may lack them.
    found = [
        each
        for each in instances_of(kind)
        if (each.__dict__.get("num_replicas"), each.__dict__.get("rank")) == (before, rank)
    ]
    for each in found:
        # Its own code may raise.
        with suppress(Exception):
            divide(each, rank, size)
    names = names_here()
    variables = dict(sys.modules["__main__"].__dict__)
    return [*holding({name: variables[name] for name in names if name in variables}, found, once=True)]


def divide(sampler: Any, rank: int, size: int) -> None:
    """Let a sampler divide its data among ranks, as its constructor does.

    Args:
        sampler: torch's DistributedSampler.
        rank: the rank whose part it returns.
        size: the number of ranks.
    """
    length = len(sampler.dataset)
    exact = sampler.drop_last and length % size != 0
    sampler.rank, sampler.num_replicas = rank, size
    sampler.num_samples = math.ceil((length - size) / size) if exact else math.ceil(length / size)
    sampler.total_size = sampler.num_samples * size
