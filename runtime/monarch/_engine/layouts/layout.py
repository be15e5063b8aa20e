"""Metadata of tensors in the program, one object for each combination."""

from __future__ import annotations

from typing import Any

import torch

from monarch._engine.dtensor_compat import DTensorSpec, spec_for
from monarch._engine.layouts.specs import Placements


class Layout:
    """Shape, strides, dtype and placements of tensors of one mesh. Compared by identity: see ``Layouts``."""

    __slots__ = ("dtype", "mesh", "ndim", "placements", "shape", "spec", "stride")
    is_local = False

    def __init__(self, mesh: Any, spec: DTensorSpec) -> None:
        meta = spec.tensor_meta
        assert meta is not None
        self.mesh: Any = mesh
        """The TensorMesh: see meshes/tensor_mesh.py, which is above this file."""
        self.spec = spec
        self.shape = torch.Size(meta.shape)
        self.ndim = len(self.shape)
        self.stride = tuple(meta.stride)
        self.dtype: torch.dtype = meta.dtype
        self.placements: Placements = tuple(spec.placements)

    @property
    def size_in_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize


class Layouts:
    """The layouts of one mesh. Any thread asks."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._known: dict[Any, Layout] = {}

    def of_spec(self, spec: DTensorSpec) -> Layout:
        """Return the layout of torch's spec."""
        meta = spec.tensor_meta
        assert meta is not None
        placements = tuple(spec.placements)
        key = tuple(meta.shape), tuple(meta.stride), meta.dtype, placements, spec.shard_order
        found = self._known.get(key)
        # setdefault, so that two threads get the same one.
        return found if found is not None else self._known.setdefault(key, Layout(self._mesh, spec))

    def of(self, shape: Any, stride: Any, dtype: torch.dtype, placements: Placements) -> Layout:
        """Return the layout of a tensor."""
        return self.of_spec(spec_for(self._mesh.device_mesh, placements, shape, stride, dtype))

    def dense(self, shape: Any, dtype: torch.dtype, placements: Placements) -> Layout:
        """Return the layout of a contiguous tensor."""
        return self.of(shape, contiguous_strides(shape), dtype, placements)

    def changed(self, layout: Layout, placements: Placements) -> Layout:
        """Return the layout of the same tensor with other placements."""
        return self.of(layout.shape, layout.stride, layout.dtype, placements)


def contiguous_strides(shape: Any) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(strides))
