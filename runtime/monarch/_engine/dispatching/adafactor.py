"""Adafactor for distributed tensors: torch's reads two norms of each parameter, and here they stay on the ranks."""

from __future__ import annotations

from typing import Any

import torch

from monarch._engine.dtensor_compat import adafactor_module
from monarch._engine.tensors.tensor import Tensor


def register_adafactor() -> None:
    """Let torch's Adafactor use the functions of this file for distributed tensors."""
    module: Any = adafactor_module
    if getattr(module.adafactor, "monarch_plain", None) is None:
        module.adafactor = _choosing(module.adafactor)


def _choosing(plain: Any) -> Any:
    def adafactor(params: Any, *args: Any, **kwargs: Any) -> None:
        if params and all(isinstance(each, Tensor) for each in params):
            _on_ranks(params, *args, **kwargs)
        else:
            plain(params, *args, **kwargs)

    # A mark on the function.
    adafactor.monarch_plain = plain  # pyright: ignore[reportFunctionMemberAccess]
    return adafactor


def _on_ranks(
    params: list[Any],
    grads: list[Any],
    row_vars: list[Any],
    col_vars: list[Any],
    variances: list[Any],
    state_steps: list[torch.Tensor],
    foreach: bool | None = None,
    grad_scale: Any = None,
    found_inf: Any = None,
    has_complex: bool = False,
    *,
    d: float,
    lr: Any,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
) -> None:
    """Do the computations of torch's function of this name, in its order."""
    if isinstance(lr, torch.Tensor):
        lr = lr.item()
    for at, param in enumerate(params):
        grad: Any = -grads[at] if maximize else grads[at]
        least = torch.finfo(param.dtype).eps if eps1 is None else eps1
        state_steps[at] += 1
        step: Any = state_steps[at].item()
        weight = step**beta2_decay
        rate = min(lr, 1 / (step**0.5))
        scale = (_norm(param) / param.numel() ** 0.5).clamp(min=eps2) * rate
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        if grad.dim() > 1:
            row, column = row_vars[at], col_vars[at]
            row.lerp_(_mean_square(grad, -1, row), weight)
            column.lerp_(_mean_square(grad, -2, column), weight)
            estimate = (row @ column) / row.mean(dim=-2, keepdim=True).clamp(min=least)
        else:
            variances[at].lerp_(grad * grad, weight)
            estimate = variances[at].clone()
        update = estimate.clamp(min=least * least).rsqrt() * grad
        shrink = (_norm(update) / (update.numel() ** 0.5 * d)).clamp(min=1.0)
        param.sub_(update * (scale / shrink).to(update.dtype))


def _norm(tensor: Any) -> Any:
    """Return the norm of a tensor on each rank, with the precision of a number in Python."""
    return tensor.norm(2).replicate().double()


def _mean_square(grad: Any, dim: int, like: Any) -> Any:
    return grad.norm(2, dim=dim, keepdim=True).square().div(grad.size(dim)).redistribute(like.placements)
