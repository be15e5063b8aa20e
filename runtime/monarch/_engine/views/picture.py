"""A picture of a distributed tensor: which rank holds which shard, with the same as text."""

from __future__ import annotations

from html import escape
from typing import Any

from monarch._core.shapes.ranks import describe_ranks
from monarch._engine.tensors.tensor import Tensor, described
from monarch._engine.values.fetching import shard_of

_WIDTH, _HEIGHT = 360.0, 200.0
"""Size of the picture in pixels."""
_MOST = 256
"""Shards that are drawn; a tensor with more is described by text."""


def shards_of(tensor: Tensor) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]:
    """Return the base ranks that hold each shard, by its sizes and offsets."""
    layout = tensor.monarch_layout
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank in layout.mesh.ranks:
        found.setdefault(shard_of(layout.mesh, layout.shape, layout.placements, rank), []).append(rank)
    return found


def picture(tensor: Tensor) -> str:
    """Return the picture as HTML; asks no rank for values."""
    shards = shards_of(tensor)
    text = f"monarch.Tensor({described(tensor)})"
    if len(shards) > _MOST or tensor.dim() == 0:
        return f"<pre>{escape(text)}\n{escape(as_text(tensor))}</pre>"
    # The first two sharded dims are drawn, the last of them from left to right.
    sharded = [dim for dim, entry in enumerate(tensor.spec) if entry is not None][:2]
    across = sharded[-1] if sharded else tensor.dim() - 1
    down = sharded[0] if len(sharded) > 1 else None
    boxes = "".join(_box(tensor, sizes, offsets, ranks, across, down) for (sizes, offsets), ranks in shards.items())
    label = escape(f"{text}; {as_text(tensor)}", quote=True)
    return (
        f"<div><code>{escape(text)}</code></div>"
        f'<svg role="img" aria-label="{label}" width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" '
        f'viewBox="-1 -1 {_WIDTH + 2:.0f} {_HEIGHT + 2:.0f}" font-family="sans-serif" font-size="12">'
        f"<title>{label}</title>{boxes}</svg>"
    )


def as_text(tensor: Tensor) -> str:
    """Return which ranks hold which shard, as text."""
    lines: list[str] = []
    for (sizes, offsets), ranks in list(shards_of(tensor).items())[:_MOST]:
        place = ", ".join(f"{offset}:{offset + size}" for size, offset in zip(sizes, offsets, strict=True))
        lines.append(f"{describe_ranks(ranks)}: [{place}]")
    return "; ".join(lines)


def _box(tensor: Tensor, sizes: Any, offsets: Any, ranks: list[int], across: int, down: int | None) -> str:
    if 0 in sizes:
        return ""
    left, width = _span(tensor, sizes, offsets, across, _WIDTH)
    top, height = (0.0, _HEIGHT) if down is None else _span(tensor, sizes, offsets, down, _HEIGHT)
    # Hues far apart for neighbours; the text says the same.
    hue = ranks[0] * 137 % 360
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="hsl({hue} 60% 85%)" stroke="#555"/>'
        f'<text x="{left + width / 2:.1f}" y="{top + height / 2:.1f}" text-anchor="middle" fill="#222" '
        f'dominant-baseline="middle">{escape(describe_ranks(ranks))}</text>'
    )


def _span(tensor: Tensor, sizes: Any, offsets: Any, dim: int, length: float) -> tuple[float, float]:
    scale = length / max(1, tensor.shape[dim])
    return offsets[dim] * scale, sizes[dim] * scale
