"""DTensor's collectives on a GPU that several ranks share, whose groups have gloo.

torch's operators for them use a function of gloo that takes memory of a GPU for its own, and the process ends by
SIGSEGV. Those of ``torch.distributed`` copy it, so the operators call them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from monarch._tensors.torch_compat import group_named

_dist: Any = dist
_gather: Any = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor
_OPERATIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@cache
def mend_shared_gpus() -> Any:
    """Register the operators for CUDA, in this process until it ends."""
    library: Any = torch.library.Library("_c10d_functional", "IMPL")
    for operator in (
        all_gather_into_tensor, all_gather_into_tensor_coalesced, reduce_scatter_tensor, reduce_scatter_tensor_coalesced
    ):  # fmt: skip
        library.impl(operator.__name__, operator, "CUDA")
    return library


def share(devices: Sequence[str]) -> bool:
    """Return whether ranks with GPUs share one.

    Args:
        devices: the devices of each rank, as in ``Place``.
    """
    return "cpu" not in devices and len(set(devices)) < len(devices)


def all_gather_into_tensor(tensor: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    """Return the tensors of all ranks one after the other."""
    made = tensor.new_empty([tensor.shape[0] * group_size if tensor.dim() else group_size, *tensor.shape[1:]])
    _gather(made, tensor.contiguous(), group=group_named(group_name))
    return made


def all_gather_into_tensor_coalesced(
    tensors: list[torch.Tensor], group_size: int, group_name: Any
) -> list[torch.Tensor]:
    """Return the same for several tensors."""
    return [all_gather_into_tensor(each, group_size, group_name) for each in tensors]


def reduce_scatter_tensor(tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: Any) -> torch.Tensor:
    """Return this rank's part of the combined tensors."""
    made = tensor.new_empty([tensor.shape[0] // group_size, *tensor.shape[1:]])
    # gloo has no mean.
    operation = _OPERATIONS["sum" if reduce_op.lower() == "avg" else reduce_op.lower()]
    _scatter(made, tensor.contiguous(), op=operation, group=group_named(group_name))
    return made.div_(group_size) if reduce_op.lower() == "avg" else made


def reduce_scatter_tensor_coalesced(
    tensors: list[torch.Tensor], reduce_op: str, group_size: int, group_name: Any
) -> list[torch.Tensor]:
    """Return the same for several tensors."""
    return [reduce_scatter_tensor(each, reduce_op, group_size, group_name) for each in tensors]
