"""Plans: how each parameter of a module is sharded over a mesh."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from monarch._core.kinds import is_a, is_mapping
from monarch._engine.layouts.specs import Placements, placements_of
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch.exceptions import ArgumentError

NAMES = ("replicate", "shard", "auto")
LARGE = 1 << 16
"""Elements from which ``"auto"`` shards a parameter: gathering smaller ones costs more than their memory."""


def split_plan(plan: Any) -> tuple[Any, dict[str, ParallelStyle]]:
    """Return a plan for parameters, and the styles of torch by pattern of module names."""
    if not is_mapping(plan):
        return plan, {}
    given: dict[str, Any] = {str(key): value for key, value in plan.items()}
    styles = {key: value for key, value in given.items() if isinstance(value, ParallelStyle)}
    return {key: value for key, value in given.items() if key not in styles}, styles


def placements_for(plan: Any, mesh: TensorMesh, name: str, tensor: torch.Tensor) -> tuple[Placements, bool]:
    """Return the placements of a parameter, and whether it is gathered when its module runs.

    Args:
        plan: a name, or specs by pattern of names of parameters.
        mesh: the mesh of the parameter.
        name: the name of the parameter in the module.
        tensor: the parameter.

    Raises:
        ArgumentError: the plan is invalid.
    """
    if is_mapping(plan):
        given: dict[str, Any] = dict(plan)
        for pattern, spec in given.items():
            if fnmatchcase(name, pattern):
                if is_a(spec, str):
                    return placements_for(spec, mesh, name, tensor)
                return placements_of(spec, mesh.axes, tensor.dim(), f"plan[{pattern!r}] for {name}"), False
        plan = "replicate"
    if plan == "shard" or (plan == "auto" and tensor.numel() >= LARGE):
        sharded = _divided(mesh, tensor)
        return sharded, any(isinstance(each, Shard) for each in sharded)
    if plan in NAMES:
        return placements_of(None, mesh.axes, tensor.dim()), False
    raise ArgumentError(
        f"plan: expected one of {', '.join(NAMES)}, or a dict of specs or parallel styles by name pattern, got {plan!r}"
    )


def _divided(mesh: TensorMesh, tensor: torch.Tensor) -> Placements:
    """Return placements that shard a parameter by all ranks, along the first dim that is large enough."""
    ranks = len(mesh.ranks)
    dim = next((at for at, size in enumerate(tensor.shape) if size >= ranks and size % ranks == 0), None)
    if dim is None:
        dim = next((at for at, size in enumerate(tensor.shape) if size >= ranks), None)
    return tuple(Replicate() if dim is None else Shard(dim) for _ in mesh.axes)


def check_patterns(plan: Any, names: list[str], what: str) -> None:
    """Raise for a pattern that matches nothing.

    Raises:
        ArgumentError: it names the pattern.
    """
    for pattern in plan if is_mapping(plan) else ():
        if not any(fnmatchcase(name, str(pattern)) for name in names):
            raise ArgumentError(
                f"plan: {pattern!r} matches no {what}; the names are {', '.join(names[:8])}"
                + (", ..." if len(names) > 8 else "")
            )
