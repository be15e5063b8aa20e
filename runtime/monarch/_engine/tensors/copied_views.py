"""Views that share no memory with their tensor on the ranks, as a part of a sharded dim: a write goes back to it.

Writes to the tensor after the view was taken do not reach the view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import MeshOpError

aten: Any = torch.ops.aten


def note_origin(views: Sequence[Any], base: Tensor, op: Any, args: Any, is_copy: bool) -> None:
    """Remember what views are of, and whether their values are copies."""
    for at, view in enumerate(views):
        if isinstance(view, Tensor):
            view.monarch_origin = base, op, tuple(args[1:]), at, is_copy


def write_back(view: Tensor) -> None:
    """Write the values of a changed view into the tensor that it is of."""
    if view.monarch_origin is None:
        return
    base, op, args, at, is_copy = view.monarch_origin
    if not is_copy:
        write_back(base)
        return
    back = _BACK.get(op)
    if back is None:
        raise MeshOpError(
            f"the result of {op} is a copy on the ranks, because it is sharded differently from its tensor; "
            f"change the tensor itself, or use an op that returns a new one"
        )
    with torch.no_grad():
        base.copy_(back(base, view, args, at))


def _reshaped(base: Tensor, view: Tensor, args: Any, at: int) -> Any:
    return view.reshape(base.shape)


def _swapped(base: Tensor, view: Tensor, args: Any, at: int) -> Any:
    return view.transpose(*(args or (0, 1)))


def _permuted(base: Tensor, view: Tensor, args: Any, at: int) -> Any:
    dims = [dim % base.dim() for dim in args[0]]
    return view.permute([dims.index(dim) for dim in range(base.dim())])


def _scattered(op: Any) -> Callable[[Tensor, Tensor, Any, int], Any]:
    def back(base: Tensor, view: Tensor, args: Any, at: int) -> Any:
        return op(base, view, *args)

    return back


def _split(base: Tensor, view: Tensor, args: Any, at: int) -> Any:
    sizes, dim = args[0], args[1] if len(args) > 1 else 0
    start = at * sizes if isinstance(sizes, int) else sum(sizes[:at])
    return aten.slice_scatter.default(base, view, dim, start, start + view.shape[dim])


def _unbound(base: Tensor, view: Tensor, args: Any, at: int) -> Any:
    return aten.select_scatter.default(base, view, args[0] if args else 0, at)


_BACK: dict[Any, Callable[[Tensor, Tensor, Any, int], Any]] = {
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.t.default: _swapped,
    aten.transpose.int: _swapped,
    aten.permute.default: _permuted,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbound,
}
"""By the op of a view: how its values become those of the whole tensor."""
