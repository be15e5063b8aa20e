"""Functions on the ranks that get their parts of tensors, in order with the ops of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._engine.dtensor_compat import tree_leaves, tree_map
from monarch._engine.local.tensor import RankTensor
from monarch._engine.parts import Part
from monarch._engine.tensor import Tensor
from monarch._engine.tensor_mesh import TensorMesh
from monarch.exceptions import ArgumentError


def execute(mesh: TensorMesh, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on each rank of a mesh and return the results as a ValueMesh."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor | RankTensor)]
    if not callable(function):
        raise ArgumentError(f"execute: expected a function, got {function!r}")
    for tensor in tensors:
        if tensor.monarch_layout.mesh is not mesh:
            raise ArgumentError(
                f"execute: a tensor is on {tensor.monarch_layout.mesh!r}, and the function runs on {mesh!r}"
            )

    def part(value: Any) -> Any:
        return Part(value.monarch_ref.number) if isinstance(value, Tensor | RankTensor) else value

    packed = tree_map(part, (args, kwargs))

    def send() -> Any:
        future = mesh.actors.execute.call(function, *packed)
        future.rename(f"execute({getattr(function, '__name__', type(function).__name__)})")
        return future.get()

    values = mesh.recovery.ask(send)

    def value_of(report: Any) -> Any:
        return report.value

    return values.map(value_of)
