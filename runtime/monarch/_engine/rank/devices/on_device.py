"""Ops of a program, which knows distributed tensors as ones of the CPU, on the device of this rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from monarch._core.kinds import is_list
from monarch._engine.dtensor_compat import cpu_attention, efficient_attention, flash_attention
from monarch._engine.issuing.encoding import Template

_FLASH_HEAD = 256
"""The largest size of a head that flash attention takes."""
_ALIGNED = 8
"""Sizes of heads are multiples of it in torch's fused kernels, and those of rows in ``_ROWS``."""
_ROWS = 32

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def on_device(template: Template, kind: str) -> Template:
    """Return a template whose op makes tensors on the device of a rank.

    Args:
        template: from the program.
        kind: type of the device.
    """
    if kind == "cpu":
        return template

    def moved(arg: Any) -> Any:
        if isinstance(arg, torch.device):
            return torch.device(kind)
        return [moved(each) for each in arg] if is_list(arg) else arg

    kwargs = {key: moved(arg) for key, arg in template.kwargs.items()}
    return template._replace(args=tuple([moved(arg) for arg in template.args]), kwargs=kwargs)


@cache
def register_gpu_attention() -> Any:
    """Let the ops of attention on CPUs, which a program sends, run on GPUs until this process ends: by torch's fused
    kernels if they can."""
    library: Any = torch.library.Library("aten", "IMPL")
    for op, kernel in zip(cpu_attention, (attention, gradients_of_attention), strict=True):
        library.impl(op, kernel, "CUDA")
    return library


def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Compute ``_scaled_dot_product_flash_attention_for_cpu``: the result, and the logarithms of its sums, of shape
    (batch, heads, queries)."""
    return _as_on_cpu(cpu_attention[0], args, kwargs, _attention(*args, **kwargs))


def gradients_of_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Compute ``_scaled_dot_product_flash_attention_for_cpu_backward``: the gradients of query, key and value."""
    return _as_on_cpu(cpu_attention[1], args, kwargs, _gradients(*args, **kwargs))


@dataclass(frozen=True)
class _Meta:
    """The part of a tensor that the strides of a result depend on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _meta(value: Any) -> Any:
    return _Meta(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _as_on_cpu(op: Any, args: Any, kwargs: Any, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return results with the strides that the program expects, on which its later views depend."""
    found: list[torch.Tensor] = []
    named = tuple([(key, _meta(value)) for key, value in kwargs.items()])
    for each, stride in zip(results, _strides(op, tuple(map(_meta, args)), named), strict=True):
        if each.stride() != stride:
            each = torch.empty_strided(each.shape, stride, dtype=each.dtype, device=each.device).copy_(each)
        found.append(each)
    return tuple(found)


@lru_cache(1024)
def _strides(op: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[tuple[int, ...], ...]:
    def bare(value: Any) -> Any:
        if not isinstance(value, _Meta):
            return value
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")

    return tuple([each.stride() for each in op(*map(bare, args), **{key: bare(value) for key, value in kwargs})])


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the result and the logarithms of its sums, of shape (batch, heads, queries)."""
    kernel = _kernel(query, key, attn_mask)
    if kernel == "flash":
        found = flash_attention[0](query, key, value, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]
    if kernel == "efficient":
        found = efficient_attention[0](query, key, value, None, True, 0.0, is_causal, scale=scale)
        return found[0], found[1][..., : query.shape[-2]]
    scores = _scores(query, key, is_causal, attn_mask, scale)
    sums = torch.logsumexp(scores, -1, keepdim=True)
    result = (scores - sums).exp().nan_to_num(0.0) @ value.to(scores.dtype)
    return result.to(query.dtype), sums.squeeze(-1)


def _gradients(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, dropout_p: float, is_causal: bool, *,
    attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Triple:  # fmt: skip
    kernel = _kernel(query, key, attn_mask)
    if kernel != "plain":
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
        if kernel == "flash":
            state = torch.zeros(2, dtype=torch.uint64, device=query.device)
            rows, columns = query.shape[-2], key.shape[-2]
            found = flash_attention[1](
                grad_out, query, key, value, out, logsumexp.contiguous(), None, None, rows, columns, 0.0, is_causal,
                state, offset, scale=scale,
            )  # fmt: skip
            return found[0], found[1], found[2]
        padding = -logsumexp.shape[-1] % _ROWS
        padded = torch.nn.functional.pad(logsumexp, (0, padding), value=math.inf).contiguous()
        wanted = [True, True, True, False]
        found = efficient_attention[1](
            grad_out, query, key, value, None, out, padded, seed, offset, 0.0, wanted, is_causal, scale=scale
        )
        return found[0], found[1], found[2]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _scores(query, key, is_causal, attn_mask, scale)
    kind = scores.dtype
    weights = (scores - logsumexp.to(kind).unsqueeze(-1)).exp().nan_to_num(0.0)
    by_out = grad_out.to(kind)
    by_weights = by_out @ value.to(kind).transpose(-2, -1)
    by_scores = weights * (by_weights - (by_out * out.to(kind)).sum(-1, keepdim=True)) * factor
    by_query, by_key = by_scores @ key.to(kind), by_scores.transpose(-2, -1) @ query.to(kind)
    by_value = weights.transpose(-2, -1) @ by_out
    return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype)


def _kernel(query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None) -> str:
    head = query.shape[-1]
    if attn_mask is not None or head % _ALIGNED or query.dtype == torch.float64 or not query.numel():
        return "plain"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    # Both kernels align a causal mask differently for other lengths.
    if query.shape[-2] != key.shape[-2]:
        return "plain"
    return "flash" if is_half and head <= _FLASH_HEAD else "efficient"


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, attn_mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Return the products of queries and keys, in float32 or float64."""
    kind = torch.promote_types(query.dtype, torch.float32)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.to(kind) * factor) @ key.to(kind).transpose(-2, -1)
    if is_causal:
        rows, columns = scores.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores
