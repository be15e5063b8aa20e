"""Metadata of rank-local tensors in the program: the same on all ranks, one object for each combination."""

from __future__ import annotations

from typing import Any

import torch

from monarch._engine.layouts.layout import contiguous_strides


class RankLayout:
    """Shape, strides and dtype of the tensors that the ranks have. Compared by identity: see ``layout_of``."""

    __slots__ = ("dtype", "mesh", "ndim", "shape", "stride")
    is_local = True

    def __init__(self, mesh: Any, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.mesh: Any = mesh
        """The TensorMesh."""
        self.shape = shape
        self.ndim = len(shape)
        self.stride = stride
        self.dtype = dtype

    @property
    def size_in_bytes(self) -> int:
        """Bytes on each rank."""
        return self.shape.numel() * self.dtype.itemsize


def layout_of(mesh: Any, shape: Any, stride: Any, dtype: torch.dtype) -> RankLayout:
    """Return the layout of rank-local tensors."""
    key = tuple(shape), tuple(stride), dtype
    known: dict[Any, RankLayout] = mesh.rank_layouts
    found = known.get(key)
    # setdefault, so that two threads get the same one.
    return found if found is not None else known.setdefault(key, RankLayout(mesh, torch.Size(shape), key[1], dtype))


def dense_layout(mesh: Any, shape: Any, dtype: torch.dtype) -> RankLayout:
    """Return the layout of contiguous rank-local tensors."""
    return layout_of(mesh, shape, contiguous_strides(shape), dtype)
