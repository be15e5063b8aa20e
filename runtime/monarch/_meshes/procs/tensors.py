"""Rank-local tensors of a mesh of processes; the engine is above this room."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from monarch._node.services.registry import declared


@declared("local.activate")
def _activate(mesh: Any) -> AbstractContextManager[Any]: ...


@declared("local.rank_tensor")
def _rank_tensor(mesh: Any, dim: str | None) -> Any: ...


class TensorMethods:
    """Methods of a mesh whose ranks compute on tensors of their own."""

    def activate(self) -> AbstractContextManager[Any]:
        """Let torch's functions in a block make rank-local tensors: one on each rank, and one object in the program.

        Returns:
            A block, ``with mesh.activate():``.
        """
        return _activate(self)

    def rank_tensor(self, dim: str) -> Any:
        """Return the coordinate of each rank along an axis, as a rank-local tensor.

        Raises:
            AxisError: the mesh has no axis of this name.
        """
        return _rank_tensor(self, dim)

    def rank_tensors(self) -> dict[str, Any]:
        """Return the coordinates of each rank as rank-local tensors, by axis."""
        return _rank_tensor(self, None)
