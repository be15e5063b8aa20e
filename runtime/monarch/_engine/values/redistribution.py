"""``redistribute``: the same tensor, sharded in another way."""

from __future__ import annotations

from typing import Any, cast

import torch

from monarch._engine.issuing.encoding import Input
from monarch._engine.layouts.specs import placements_of, without_partial
from monarch._engine.tensors.tensor import Tensor


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, placements: Any) -> Tensor:
        # Each rank of an axis with terms gets the whole gradient.
        ctx.placements = without_partial(tensor.monarch_layout.placements)
        return moved(tensor, placements)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return moved(grads[0], ctx.placements), None


def redistribute(tensor: Tensor, spec: Any) -> Tensor:
    """Return a tensor sharded as a spec or placements say."""
    layout = tensor.monarch_layout
    placements = placements_of(spec, layout.mesh.axes, layout.ndim, "spec")
    return to_placements(tensor, placements)


def to_placements(tensor: Tensor, placements: Any) -> Tensor:
    """Return a tensor with other placements, in the graph of autograd."""
    if tensor.monarch_layout.placements == placements:
        return tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast("Any", _Redistribute).apply(tensor, placements)
    return moved(tensor, placements)


def moved(tensor: Tensor, placements: Any) -> Tensor:
    """Return a tensor with other placements, outside of autograd."""
    layout = tensor.monarch_layout
    if layout.placements == placements:
        return cast("Any", tensor.detach())
    mesh = layout.mesh
    result = mesh.make(mesh.layouts.changed(layout, placements))
    mesh.issue("redistribute", (Input(0), tuple(placements)), (tensor,), (), (result,))
    return result
