"""Operations on plain tensors of this rank, for the rank-local view of a mesh."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from monarch._engine.dtensor_compat import collectives_of_ranks as collectives
from monarch._engine.issuing.encoding import find_op
from monarch._engine.rank.operations.table import OPERATIONS
from monarch._engine.rank.shards.making import wrap

_streams: dict[int, Any] = {}
"""CUDA streams by the number that the program gave them. Used by the thread of the executor."""
_known_ops: dict[tuple[str, ...], Any] = {}
"""Ops by name. Likewise."""


def on_stream(mesh: Any, number: int) -> AbstractContextManager[Any]:
    """Return a block whose kernels run on a stream of the program; on the CPU all ops run in order."""
    if not number or mesh.device_type != "cuda":
        return nullcontext()
    return torch.cuda.stream(_stream(number))


def _stream(number: int) -> Any:
    if not number:
        return torch.cuda.default_stream()
    found = _streams.get(number)
    if found is None:
        found = _streams[number] = torch.cuda.Stream()
    return found


def _rank_op(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    """Run an op of torch with a seed from the program, or on another stream than the main one."""
    name, given, stream, is_random = args
    found = _known_ops.get(name)
    if found is None:
        found = _known_ops[name] = find_op(name)
    with on_stream(mesh, stream):
        if not is_random:
            return found(*given, **kwargs)
        cuda = mesh.device_type == "cuda"
        devices = [torch.cuda.current_device()] if cuda else []
        with cast("Any", torch.random).fork_rng(devices):
            # The same on all ranks, as after torch.manual_seed() in each of them.
            torch.default_generator.manual_seed(values[-1])
            if cuda:
                torch.cuda.manual_seed(values[-1])
            return found(*given, **kwargs)


def _order(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> list[Any]:
    if mesh.device_type == "cuda":
        first, second = args
        _stream(second).wait_stream(_stream(first))
    return []


def _rank_tensor(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> torch.Tensor:
    at = mesh.mesh_dim_names.index(args[0])
    return torch.tensor(mesh.get_coordinate()[at], dtype=torch.int64, device=mesh.device_type)


def _same(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return args[0]


def _to_local(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return plain(args[0]).contiguous()


def _from_local(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> DTensor:
    shard, shape, placements = args
    return wrap(shard.contiguous(), mesh, placements, shape)


def plain(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor of either view."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Any = tensor.to_local().detach()
    return local.wait() if hasattr(local, "wait") else local


# The older names warn where there are newer ones.
_gather: Any = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_scatter: Any = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def _reduce(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    tensor, axes, reduction, scatter, in_place, stream = args
    with on_stream(mesh, stream):
        result = tensor
        for axis in axes:
            result = _along(result, reduction, scatter, mesh.get_group(axis))
        if in_place:
            tensor.copy_(result)
            return []
        return result if axes else tensor.clone()


def _along(tensor: torch.Tensor, reduction: str, scatter: bool, group: Any) -> torch.Tensor:
    # A change of the result must not change the tensor, nor what torch still sends.
    source = tensor.contiguous()
    if reduction == "stack":
        if scatter:
            return _done(collectives.all_to_all_single(source, None, None, group))
        return _done(_gather(source.unsqueeze(0), 0, group))
    kind = "sum" if reduction == "avg" else reduction
    if scatter:
        result = _done(_scatter(source, kind, 0, group)).squeeze(0)
    else:
        result = _done(collectives.all_reduce(source, kind, group))
    if reduction == "avg":
        mode = None if result.dtype.is_floating_point or result.dtype.is_complex else "floor"
        result = torch.div(result, group.size(), rounding_mode=mode)
    return result


def _done(result: Any) -> torch.Tensor:
    return result.wait() if hasattr(result, "wait") else result


OPERATIONS.update(
    {
        "rank_op": _rank_op,
        "order": _order,
        "rank_tensor": _rank_tensor,
        "same": _same,
        "to_local": _to_local,
        "from_local": _from_local,
        "reduce": _reduce,
    }
)
