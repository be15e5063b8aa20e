"""torch's DeviceMesh over existing process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from monarch._tensors.collectives.world import BOTH, World


def make_device_mesh(
    world: World, groups: Sequence[Any], ranks: Sequence[int], sizes: Sequence[int], labels: Sequence[str]
) -> DeviceMesh:
    """Return a DeviceMesh of some ranks, with one group of this rank for each axis.

    Args:
        world: the default group, which defines the rank numbers.
        groups: this rank's, one along each axis.
        ranks: all ranks, in row-major order.
        sizes: the sizes of the axes.
        labels: names of the axes.
    """
    device = "cuda" if world.backend(ranks) == BOTH else "cpu"
    mesh = torch.tensor(list(ranks)).view(*sizes)
    return DeviceMesh.from_group(
        list(groups) if len(groups) > 1 else groups[0], device, mesh=mesh, mesh_dim_names=tuple(labels)
    )
