"""New distributed tensors: from values of the program, or made on the ranks without a byte through the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from monarch._core.kinds import is_a
from monarch._engine import wiring
from monarch._engine.issuing.seeds import new_seed
from monarch._engine.layouts.specs import Placements, Spec, placements_of
from monarch._engine.meshes.tensor_mesh import TensorMesh, tensor_mesh_of
from monarch._engine.tensors.tensor import Tensor, above
from monarch._engine.values.arrays import as_tensor
from monarch._engine.values.distributing import distribute_to
from monarch.exceptions import ArgumentError

wiring.wire()
_RANDOM = ("rand", "randn")


def distribute(tensor: Any, mesh: Any, sharding_spec: Spec = None) -> Tensor:
    """Return a distributed tensor with a value of the program. Each rank gets its shard only.

    Args:
        tensor: a tensor, a NumPy or Arrow array, or an Arrow table with columns of one type. Its memory is read
            at once, even if it is mapped from a file, for example with ``torch.load(mmap=True)``.
        mesh: a Mesh, or a mesh of processes or a slice of one.
        sharding_spec: for each dim of the tensor an axis of the mesh that shards it, a sequence of axes, or None;
            None alone gives each rank the whole value.

    Raises:
        AxisError: the mesh has no axis of this name.
        ArgumentError: the spec does not fit the tensor, or some values are not numbers, or are missing.
        DeviceMeshError: a rank has died.
    """
    value = as_tensor(tensor)
    if isinstance(value, Tensor):
        if tensor_mesh_of(mesh) is value.monarch_layout.mesh:
            return value.redistribute(sharding_spec)
        value = value.full_tensor()
    target = tensor_mesh_of(mesh)
    placements = placements_of(sharding_spec, target.axes, value.dim())
    made = distribute_to(target, value.detach(), placements)
    return leaf(made, value.requires_grad)


def leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return the same tensor, whose use autograd records or not."""
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(cast("Sequence[Any]", size[0]))
    if not all(isinstance(each, int) and each >= 0 for each in size):
        raise ArgumentError(f"size: expected non-negative ints, got {size!r}")
    return tuple(size)


def made_on_ranks(
    kind: str,
    shape: tuple[int, ...],
    mesh: Any,
    spec: Spec,
    dtype: torch.dtype | None,
    requires_grad: bool,
    numbers: tuple[Any, ...],
) -> Tensor:
    """Return a new tensor that the ranks make, each its shard."""
    if not (dtype is None or is_a(dtype, torch.dtype)):
        raise ArgumentError(f"dtype: expected a torch.dtype such as torch.float32, got {dtype!r}")
    if kind in _RANDOM and dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"dtype: expected a floating-point or complex dtype for {kind}, got {dtype}")
    target = tensor_mesh_of(mesh)
    placements = placements_of(spec, target.axes, len(shape), "spec")
    made = made_with_placements(target, kind, shape, dtype or torch.get_default_dtype(), placements, numbers)
    return leaf(made, requires_grad)


def made_with_placements(
    mesh: TensorMesh, kind: str, shape: tuple[int, ...], dtype: torch.dtype, placements: Placements, numbers: Any
) -> Tensor:
    """Return a new tensor that the ranks make; see ``made_on_ranks``."""
    made = mesh.make(mesh.layouts.dense(shape, dtype, placements))
    mesh.issue("make", (kind, shape, dtype, placements), (), numbers, (made,))
    return made


def _maker(kind: str, numbers: Callable[[], tuple[Any, ...]], what: str) -> Callable[..., Tensor]:
    def make(
        *size: Any, mesh: Any, spec: Spec = None, dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> Tensor:
        return made_on_ranks(kind, _shape(size), mesh, spec, dtype, requires_grad, numbers())

    make.__name__ = make.__qualname__ = kind
    make.__doc__ = f"""Return a distributed tensor {what}, made on the ranks.

    Args:
        size: of each dim, as for ``torch.{kind}``.
        mesh: a Mesh, or a mesh of processes or a slice of one.
        spec: how it is sharded: see ``monarch.distribute``.
        dtype: the default type of torch without one.
        requires_grad: whether autograd records its use.
    """
    return make


def _none() -> tuple[Any, ...]:
    return ()


def _seeded() -> tuple[Any, ...]:
    return (new_seed(),)


zeros = _maker("zeros", _none, "of zeros")
ones = _maker("ones", _none, "of ones")
empty = _maker("empty", _none, "without values")
rand = _maker("rand", _seeded, "of random numbers from 0 to 1, the same however it is sharded")
randn = _maker("randn", _seeded, "of normally distributed random numbers, the same however it is sharded")


def full(
    size: Any,
    fill_value: float,
    *,
    mesh: Any,
    spec: Spec = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a distributed tensor with one value everywhere, made on the ranks; see ``monarch.zeros``."""
    kind = dtype or torch.full((), fill_value).dtype
    shape = _shape((size,) if isinstance(size, int) else tuple(size))
    return made_on_ranks("full", shape, mesh, spec, kind, requires_grad, (fill_value,))


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    mesh: Any,
    spec: Spec = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a distributed tensor with numbers from ``start`` to below ``end``; see ``monarch.zeros``."""
    first, last = (0, start) if end is None else (start, end)
    model = torch.arange(first, last, step, dtype=dtype, device="meta")
    return made_on_ranks("arange", tuple(model.shape), mesh, spec, model.dtype, requires_grad, (first, step))


def from_local(function: Callable[..., torch.Tensor] | torch.Tensor, mesh: Any, spec: Spec, *args: Any) -> Tensor:
    """Return a distributed tensor whose shards come from a function on each rank, or from a rank-local tensor.

    Args:
        function: returns the shard of the rank on which it runs; ``monarch.current_rank()`` has its coordinates. Or a
            rank-local tensor: then gradients flow back to it.
        mesh: a Mesh, or a mesh of processes or a slice of one.
        spec: how the tensor is sharded: see ``monarch.distribute``. Along axes that shard nothing, all ranks
            must return the same.
        args: for the function.

    Raises:
        ArgumentError: ``function`` is neither of the two.
        ActorError: the function raised.
        ShapeError: the shards do not fit together.
    """
    from monarch._engine.from_local import assemble

    if not (callable(function) or is_a(function, torch.Tensor)):
        raise ArgumentError(f"from_local: expected a function or a rank-local tensor, got {type(function).__name__}")
    if isinstance(function, torch.Tensor):
        return above.assembled(function, tensor_mesh_of(mesh), spec)
    return assemble(tensor_mesh_of(mesh), function, spec, args)
