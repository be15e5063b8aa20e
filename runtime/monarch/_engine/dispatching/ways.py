"""Ops that torch's DTensor runs wrongly or refuses on sharded tensors, and that other ops compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import is_ as is_same
from typing import Any

import torch

from monarch._core.kinds import is_list
from monarch._engine.dtensor_compat import check_of_linalg, fused_sgd, largest_of_each, shard_sizes, truth_checks
from monarch._engine.layouts.specs import is_replicated, replicated, without_partial
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.redistribution import moved

aten: Any = torch.ops.aten
Issue = Callable[[Any, Any, Any], Any]
"""Issues an op with its arguments as it is, and returns its results."""
Way = Callable[[Any, Any], tuple[bool, Any]]
"""Gets the arguments of an op, and returns whether it is done, and its result."""


_OF_VALUES = (
    *(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default, aten.aminmax.default),
    *(aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default),
    *largest_of_each,
)
"""Ops that have no result for a shard without elements."""


def ways(issue: Issue) -> dict[Any, Way]:
    """Return another way for each of these ops."""
    return {
        **{op: _batch_norm(op, issue) for op in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)},
        **{op: _masked(op, issue) for op in (aten.embedding.default, aten.gather.default)},
        **{op: _as_op(same, issue) for op, same in truth_checks.items()},
        **{op: _of_values(op, issue) for op in _OF_VALUES},
        aten.native_group_norm_backward.default: _group_norm_backward(issue),
        aten.index_put.default: _index_put(aten.index_put.default, issue),
        aten.index_put_.default: _index_put(aten.index_put.default, issue, in_place=True),
        **dict.fromkeys(fused_sgd, _fused_sgd_way),
        check_of_linalg: check_results,
    }


def _batch_norm(op: Any, issue: Issue) -> Way:
    """Change the running statistics by ops of their own: of sharded inputs, DTensor leaves them as they were."""

    def run(args: Any, kwargs: Any) -> tuple[bool, Any]:
        given, weight, bias, mean, variance, training, momentum, eps = args
        if not training or not all(isinstance(each, Tensor) for each in (given, mean, variance)):
            return False, None
        if all(is_replicated(each.placements) for each in (given, mean, variance)):
            return False, None
        result = issue(op, (given, weight, bias, None, None, training, momentum, eps), kwargs)
        count = given.numel() // given.shape[1]
        batch_mean, scale = (moved(each, replicated(each.placements)) for each in result[1:3])
        batch_variance = scale.pow(-2).sub(eps).mul(count / max(count - 1, 1))
        pairs: list[tuple[Any, Any]] = [(mean, batch_mean), (variance, batch_variance)]
        for statistic, of_batch in pairs:
            # Sharded as the statistic, so that the sum is too: it is not combined in place.
            statistic.mul_(1 - momentum).add_(moved(of_batch, without_partial(statistic.placements)), alpha=momentum)
        return True, result

    return run


def _as_op(op: Any, issue: Issue) -> Way:
    """Issue an op that computes the same, and that DTensor has a rule for."""

    def run(args: Any, kwargs: Any) -> tuple[bool, Any]:
        return True, issue(op, args, kwargs)

    return run


def _masked(op: Any, issue: Issue) -> Way:
    """Combine the rows that ranks have found in their shards at once: DTensor's terms with a mask allow no views."""

    def run(args: Any, kwargs: Any) -> tuple[bool, Any]:
        # A shard without rows has none to find an index in.
        result = issue(op, tuple(_filled(each) for each in args), kwargs)
        return True, moved(result, without_partial(result.placements))

    return run


def _of_values(op: Any, issue: Issue) -> Way:
    """Compute on whole values if a rank has no element: nothing is the largest of none."""

    def run(args: Any, kwargs: Any) -> tuple[bool, Any]:
        given = args[0]
        filled = [_filled(each) for each in given] if is_list(given) else _filled(given)
        if filled is given or (is_list(given) and all(map(is_same, given, filled))):
            return False, None
        return True, issue(op, (filled, *args[1:]), kwargs)

    return run


def _filled(value: Any) -> Any:
    """Return a tensor with elements on each rank: a whole one if there are fewer of them than ranks."""
    return _whole(value) if isinstance(value, Tensor) and _has_empty_shard(value) else value


def _has_empty_shard(tensor: Tensor) -> bool:
    layout = tensor.monarch_layout
    sizes = layout.mesh.sizes
    if is_replicated(layout.placements) or min(layout.shape, default=1) >= math.prod(sizes) ** 2:
        return False
    # The last rank along each axis has the smallest shards.
    return 0 in shard_sizes(layout.shape, sizes, [size - 1 for size in sizes], without_partial(layout.placements))[0]


def _group_norm_backward(issue: Issue) -> Way:
    """Compute on whole values, with a gradient of the input: torch's rule takes sizes of shards for those of wholes."""
    op = aten.native_group_norm_backward.default

    def run(args: Any, kwargs: Any) -> tuple[bool, Any]:
        mask, given = args[-1], args[1]
        if all(is_replicated(each.placements) for each in args if isinstance(each, Tensor)) and mask[0]:
            return False, None
        found = issue(op, (*(_whole(each) for each in args[:-1]), [True, *mask[1:]]), kwargs)
        return True, (moved(found[0], without_partial(given.placements)) if mask[0] else None, *found[1:])

    return run


def _index_put(op: Any, issue: Issue, in_place: bool = False) -> Way:
    """Write to a sharded tensor by a mask or indices: DTensor refuses, or shards masks as if they had one dim."""

    def run(args: Any, kwargs: Any) -> tuple[bool, Any]:
        target, indices, values = args[:3]
        adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        if not isinstance(target, Tensor) or is_replicated(target.placements):
            return False, None
        if in_place and without_partial(target.placements) != target.placements:
            # Terms are combined first, and the op is issued again.
            return False, None
        first = indices[0]
        if len(indices) == 1 and first is not None and first.dtype == torch.bool and values.numel() == 1 and not adds:
            mask = first.view(*first.shape, *[1] * (target.dim() - first.dim()))
            fill = target.masked_fill_ if in_place else target.masked_fill
            return True, fill(mask, values.view(()))
        found = issue(op, (_whole(target), [_whole(each) for each in indices], _whole(values), adds), {})
        placed = moved(found, without_partial(target.placements))
        return True, target.copy_(placed) if in_place else placed

    return run


def check_results(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Let the results of an op of ``torch.linalg`` have no values if the check of them fails on a rank."""
    info = args[0]
    if not info.monarch_vouches:
        return False, None
    tensors = info, *info.monarch_vouches
    given = args[1], kwargs["is_matrix"]
    info.monarch_layout.mesh.issue("check", given, tensors, writes=tuple(range(len(tensors))))
    return True, None


def _whole(value: Any) -> Any:
    return moved(value, replicated(value.placements)) if isinstance(value, Tensor) else value


def _fused_sgd_way(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Run SGD tensor by tensor: torch has no rule for the fused form."""
    rate, momentum = kwargs["lr"], kwargs["momentum"]
    rate = rate.item() if isinstance(rate, torch.Tensor) else rate
    scale, infinite = kwargs.get("grad_scale"), kwargs.get("found_inf")
    if infinite is not None and infinite.item():
        return True, None
    params, grads, buffers = args
    for at, (param, given) in enumerate(zip(params, grads, strict=True)):
        grad = given if scale is None else given.div_(scale.item())
        grad = -grad if kwargs["maximize"] else grad
        if kwargs["weight_decay"]:
            grad = grad.add(param, alpha=kwargs["weight_decay"])
        if momentum:
            buffer = buffers[at]
            if kwargs["is_first_step"]:
                buffer.copy_(grad)
            else:
                buffer.mul_(momentum).add_(grad, alpha=1 - kwargs["dampening"])
            grad = grad.add(buffer, alpha=momentum) if kwargs["nesterov"] else buffer
        param.add_(grad, alpha=-rate)
    return True, None
