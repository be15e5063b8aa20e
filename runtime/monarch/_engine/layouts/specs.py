"""Sharding specs: for each dim of a tensor the axes of the mesh that shard it; and torch's placements.

``["dp", None]`` shards dim 0 along the axis ``dp``; ``[("dp", "mp"), None]`` along both; None shards nothing.
A placement of torch is the same by axis: ``(Shard(0), Replicate())``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from monarch._core.kinds import is_a
from monarch.exceptions import ArgumentError, AxisError

Spec = Sequence[Any] | None
"""One entry for each dim of the tensor: an axis, a sequence of axes, or None. None alone replicates."""
Placements = tuple[Placement, ...]


def placements_of(spec: Spec, axes: Sequence[str], ndim: int, what: str = "sharding_spec") -> Placements:
    """Return the placements of a spec.

    Args:
        spec: by dim of the tensor, or already placements by axis.
        axes: the axes of the mesh.
        ndim: the number of dims of the tensor.
        what: names the argument in errors.

    Raises:
        AxisError: the mesh has no axis of this name.
        ArgumentError: the spec has another length, or names an axis twice or in another order than the mesh.
    """
    found: list[Placement] = [Replicate() for _ in axes]
    if spec is None:
        return tuple(found)
    if isinstance(spec, str) or not is_a(spec, Sequence):
        raise ArgumentError(f'{what}: expected a list with an entry for each dim, such as ["dp", None], got {spec!r}')
    if any(isinstance(each, Placement) for each in spec):
        return _as_placements(spec, axes, ndim, what)
    if len(spec) != ndim:
        raise ArgumentError(f"{what}: expected {ndim} entries, one for each dim of the tensor, got {list(spec)}")
    for dim, entry in enumerate(spec):
        if not (entry is None or isinstance(entry, str) or is_a(entry, Sequence)):
            raise ArgumentError(f"{what}: expected an axis, a sequence of axes or None for dim {dim}, got {entry!r}")
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        places = [_axis(name, axes, what) for name in names]
        if places != sorted(places):
            raise ArgumentError(f"{what}: name the axes of dim {dim} in the order of the mesh, {tuple(axes)}")
        for place in places:
            if not isinstance(found[place], Replicate):
                raise ArgumentError(f"{what}: axis {axes[place]!r} is named twice; one axis shards one dim")
            found[place] = Shard(dim)
    return tuple(found)


def _axis(name: Any, axes: Sequence[str], what: str) -> int:
    if name not in axes:
        raise AxisError(f"{what}: the mesh has no axis {name!r}; it has {', '.join(axes)}")
    return list(axes).index(name)


def _as_placements(spec: Sequence[Any], axes: Sequence[str], ndim: int, what: str) -> Placements:
    if len(spec) != len(axes) or not all(isinstance(each, Placement) for each in spec):
        raise ArgumentError(f"{what}: expected one placement for each axis {tuple(axes)}, got {list(spec)}")
    # A negative dim counts from the end.
    fixed = [Shard(shard_dim(each) + ndim) if shard_dim(each) < 0 else each for each in spec]
    if any(isinstance(each, Shard) and not 0 <= shard_dim(each) < ndim for each in fixed):
        raise ArgumentError(f"{what}: the tensor has {ndim} dims, got {list(spec)}")
    return tuple(fixed)


def shard_dim(placement: Any) -> int:
    """Return the dim that a placement shards; 0 if it shards none."""
    return int(getattr(placement, "dim", 0)) if isinstance(placement, Shard) else 0


def spec_of(placements: Placements, axes: Sequence[str], ndim: int) -> list[Any]:
    """Return the spec of placements: None, an axis, or a tuple of axes for each dim of the tensor."""
    found: list[list[str]] = [[] for _ in range(ndim)]
    for axis, placement in zip(axes, placements, strict=True):
        dim: int | None = getattr(placement, "dim", None)
        if dim is not None:
            found[dim].append(axis)
    return [None if not names else names[0] if len(names) == 1 else tuple(names) for names in found]


def partial_axes(placements: Placements, axes: Sequence[str]) -> dict[str, str]:
    """Return the axes along which each rank has a term of the value, with the operation that combines them."""
    return {
        axis: str(getattr(placement, "reduce_op", ""))
        for axis, placement in zip(axes, placements, strict=True)
        if isinstance(placement, Partial)
    }


def is_replicated(placements: Placements) -> bool:
    """Return whether each rank has the whole value."""
    return all(isinstance(placement, Replicate) for placement in placements)


def replicated(placements: Placements) -> Placements:
    """Return placements of the same mesh with the whole value on each rank."""
    return tuple(Replicate() for _ in placements)


def without_partial(placements: Placements) -> Placements:
    """Return the placements with terms combined on each rank; what is sharded stays sharded."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def describe_spec(placements: Placements, axes: Sequence[str], ndim: int) -> str:
    """Return the spec as a person writes it, such as ``["dp", None]``."""
    text = ", ".join(_quoted(entry) for entry in spec_of(placements, axes, ndim))
    terms = "".join(f", partial along {axis} ({op})" for axis, op in partial_axes(placements, axes).items())
    return f"[{text}]{terms}"


def _quoted(entry: Any) -> str:
    if entry is None or isinstance(entry, str):
        return "None" if entry is None else f'"{entry}"'
    return "(" + ", ".join(f'"{name}"' for name in entry) + ")"
