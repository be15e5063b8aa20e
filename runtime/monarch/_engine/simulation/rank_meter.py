"""The meter of a program that runs on each rank by itself: it finds the line of each op, and groups as they come."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from monarch._engine.dtensor_compat import group_of_name, group_of_object, local_scalar, tree_leaves
from monarch._engine.issuing.lines import lines
from monarch._engine.simulation.meter import OpMeter

_NAMES = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
}
"""Ops of process groups, as the program calls them."""


class RankMeter(OpMeter):
    """Sees the ops of one rank. Reads of values give NaN or zeros.

    Args:
        gpus: devices of each host.
        *args: see Meter.
    """

    def __init__(self, gpus: int, *args: Any) -> None:
        super().__init__(*args)
        self._gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is local_scalar:
            dtype = args[0].dtype
            return float("nan") if dtype.is_floating_point else False if dtype is torch.bool else 0
        self.line = lines.here()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _sent(self, name: str, args: Any, size: int) -> tuple[str, str | None, int]:
        space, _, rest = name.partition(".")
        op = rest.partition(".")[0]
        if space == "c10d":
            # Results come first, if there are any.
            for given in args[1::-1]:
                tensors = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
                if tensors:
                    size = sum(each.numel() * each.element_size() for each in tensors)
                    break
        group = next((found for found in map(self._group, args) if found is not None), None)
        return f"c10d.{_NAMES.get(op, op.rstrip('_'))}", group, size

    def _group(self, arg: Any) -> str | None:
        group = group_of_object(arg)
        name: Any = group.group_name if group is not None else arg if isinstance(arg, str) else None
        if name is None or name in self.groups:
            return name
        if group is None:
            group = group_of_name(name)
        if group is None:
            return None
        ranks = dist.get_process_group_ranks(group)
        about = str(getattr(group, "group_desc", ""))
        axis = about.removeprefix("mesh_") if about.startswith("mesh_") else "all ranks"
        if len(ranks) < dist.get_world_size() and not about.startswith("mesh_"):
            axis = f"{len(ranks)} ranks"
        self.groups[name] = axis, len(ranks), len({rank // self._gpus for rank in ranks}) > 1
        return name
