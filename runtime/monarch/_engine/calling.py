"""Functions on the ranks that get their shards of tensors, in order with the ops of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._core.shapes.value_mesh import ValueMesh
from monarch._engine.dtensor_compat import tree_leaves, tree_map
from monarch._engine.issuing.shard_refs import ShardRef
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.executing import Execution
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.rank.functions.calling import name_of
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import ArgumentError


def execute(mesh: TensorMesh, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on each rank of a mesh and return the results as a ValueMesh."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor | RankTensor)]
    if not callable(function):
        raise ArgumentError(f"execute: expected a function, got {function!r}")
    for tensor in tensors:
        if tensor.monarch_layout.mesh is not mesh:
            raise ArgumentError(
                f"execute: a tensor is on {tensor.monarch_layout.mesh!r}, but the function runs on {mesh!r}"
            )

    def shard(value: Any) -> Any:
        return ShardRef(value.monarch_ref.number) if isinstance(value, Tensor | RankTensor) else value

    packed = tree_map(shard, (args, kwargs))

    mesh.recovery.before_look()
    sent = Execution(mesh.stream, mesh.actors, function, *packed)
    sent.future.rename(f"execute({name_of(function)})")
    values = [report.value for report in mesh.recovery.answers(sent).values()]
    return ValueMesh.of(mesh.region.extent, values, mesh.region.base_ranks)
