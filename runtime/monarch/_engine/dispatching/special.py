"""Ops with another way than the stream: those that look at a value, and those that torch runs wrongly on shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate

from monarch._engine.dtensor_compat import (
    lazy_conjugate,
    lazy_negative,
    local_scalar,
    same_storage_numel,
    schema_of,
    unscale,
)
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.distributing import distribute_to
from monarch._engine.values.fetching import item

aten: Any = torch.ops.aten


def _local_scalar(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, item(args[0])


def _equal(args: Any, kwargs: Any) -> tuple[bool, Any]:
    if args[0].shape != args[1].shape:
        return True, False
    return True, bool(torch.eq(args[0], args[1]).all().item())


def _all_close(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, bool(torch.isclose(*args, **kwargs).all().item())


def _copy(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Copy between a distributed tensor and one of the program, each sharded as its target."""
    target, source = args[0], args[1]
    if not isinstance(target, Tensor):
        return True, target.copy_(source.full_tensor())
    if isinstance(source, Tensor):
        return False, None
    layout = target.monarch_layout
    value = source.detach().expand(layout.shape)
    if value.dtype != layout.dtype:
        value = value.to(layout.dtype)
    return True, target.copy_(distribute_to(layout.mesh, value, layout.placements))


def _fill(args: Any, kwargs: Any) -> tuple[bool, Any]:
    target, value = args
    return True, target.copy_(value.expand(target.shape)) if isinstance(value, Tensor) else target.fill_(value.item())


def _unbind(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Gather the dim that is taken apart, for which torch has no rule."""
    tensor, dim = args[0], args[1] if len(args) > 1 else 0
    placements = tensor.monarch_layout.placements
    whole = tuple(Replicate() if each.is_shard(dim % tensor.dim()) else each for each in placements)
    if whole == placements:
        return False, None
    views = [aten.select.int(tensor, dim, at) for at in range(tensor.shape[dim])]
    return True, views


def _same_size(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, args[0].shape == args[1].shape


def _not_pinned(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, False


def _same_storage(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, args[0].numel() == args[1].numel()


def _unscaled(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Divide gradients by the scale of a GradScaler, whose state is the program's."""
    grads, found_inf, inverse = args
    if isinstance(found_inf, Tensor):
        return False, None
    factor = inverse.item()
    finite = [torch.isfinite(grad).all() for grad in grads]
    for grad in grads:
        grad.mul_(factor)
    if not torch.stack(finite).all().item():
        found_inf.fill_(1.0)
    return True, None


_MEAN, _SUM = 1, 2
"""Reductions of losses, as torch numbers them."""


def _mean_loss(op: Any, backward: bool) -> Any:
    """Return the way of a loss or its gradient, for whose mean torch takes the sizes of shards for those of the whole.

    It runs as a sum, which is then sharded.
    """
    at = next(place for place, each in enumerate(schema_of(op).arguments) if each.name == "reduction")

    def loss(args: Any, kwargs: Any) -> tuple[bool, Any]:
        first = 1 if backward else 0
        reduction = args[at] if len(args) > at else kwargs.get("reduction", _MEAN)
        tensors = [each for each in args[: at + 1] if isinstance(each, Tensor)]
        if reduction != _MEAN or not any(each.is_shard() for tensor in tensors for each in tensor.placements):
            return False, None
        count = int(cast("Any", torch).broadcast_shapes(args[first].shape, args[first + 1].shape).numel())
        if not count:
            return False, None
        named = {key: each for key, each in kwargs.items() if key != "reduction"}
        middle = [*args[:at], *[None] * (at - len(args))]
        if backward:
            middle[0] = aten.div.Scalar(args[0], count)
        result = op(*middle, _SUM, *args[at + 1 :], **named)
        return True, result if backward else aten.div.Scalar(result, count)

    return loss


_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


def special_ops(run: Callable[[Any, Any, Any], Any]) -> dict[Any, Any]:
    """Return ops with another way than the stream; each returns whether it is done, and its result.

    Args:
        run: issues an op as it is.
    """

    def conjugated(args: Any, kwargs: Any) -> tuple[bool, Any]:
        # At once, as a copy does: a tensor without memory has no bit for lazy values.
        return True, aten.clone.default(run(lazy_conjugate, args, kwargs))

    def negated(args: Any, kwargs: Any) -> tuple[bool, Any]:
        return True, aten.clone.default(run(lazy_negative, args, kwargs))

    return {
        **{op: _mean_loss(op, False) for op in [getattr(aten, each).default for each in _LOSSES]},
        **{op: _mean_loss(op, True) for op in [getattr(aten, f"{each}_backward").default for each in _LOSSES]},
        aten.binary_cross_entropy_with_logits.default: _mean_loss(aten.binary_cross_entropy_with_logits.default, False),
        unscale: _unscaled,
        lazy_conjugate: conjugated,
        lazy_negative: negated,
        aten.item.default: _local_scalar,
        same_storage_numel: _same_storage,
        local_scalar: _local_scalar,
        aten.equal.default: _equal,
        aten.allclose.default: _all_close,
        aten.is_nonzero.default: _local_scalar,
        aten.copy_.default: _copy,
        aten.fill_.Tensor: _fill,
        aten.unbind.int: _unbind,
        aten.is_same_size.default: _same_size,
        aten.is_pinned.default: _not_pinned,
    }
