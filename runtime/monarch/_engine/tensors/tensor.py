"""A distributed tensor, as the program sees it: metadata and a reference. The ranks hold the values."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from monarch._engine.dtensor_compat import is_parameter, no_torch_function, wrapper
from monarch._engine.layouts.layout import Layout
from monarch._engine.layouts.specs import describe_spec, partial_axes, spec_of
from monarch._engine.tensors.devices import OnRanks
from monarch.exceptions import MeshOpError

if TYPE_CHECKING:
    from monarch._engine.issuing.stream import Ref


class Above:
    """Functions of files above this one, which need the class below; ``wiring.py`` sets them."""

    dispatch: Any
    redistribute: Any
    full_tensor: Any
    describe: Any
    picture: Any
    to_local: Any
    assembled: Any
    to_mesh: Any
    refuse_mixed: Any


above = Above()


class Tensor(OnRanks, torch.Tensor):
    """A tensor whose shards are on the ranks of a mesh. It computes like any other tensor.

    Ops return at once: they are sent to the ranks in batches. ``item()``, ``float()``, ``tolist()``, ``numpy()``,
    ``full_tensor()``, ``fetch()`` and printing wait for values. Make one with ``monarch.distribute``, ``zeros``,
    ``randn`` and the like.
    """

    monarch_ref: Ref
    monarch_layout: Layout
    monarch_origin: Any
    """For a view whose values the ranks have copied, or a view of one: see copied_views.py."""
    monarch_vouches: tuple[Tensor, ...] = ()
    """For what tells whether an op of ``torch.linalg`` has succeeded, its results."""

    @staticmethod
    def __new__(cls: Any, ref: Ref, layout: Layout, requires_grad: bool = False) -> Tensor:
        made = wrapper(cls, layout.shape, layout.stride, layout.dtype, layout.mesh.device, requires_grad)
        made.monarch_ref = ref
        made.monarch_layout = layout
        made.monarch_origin = None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # Ops of torch go straight to __torch_dispatch__.
    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        if len(types) > 1:
            above.refuse_mixed(func, types)
        return above.dispatch(func, args, kwargs or {})

    @property
    def mesh(self) -> Any:
        """The mesh that holds the tensor."""
        return self.monarch_layout.mesh.public

    @property
    def spec(self) -> list[Any]:
        """For each dim the axis of the mesh that shards it, several axes, or None."""
        return spec_of(self.monarch_layout.placements, self.monarch_layout.mesh.axes, self.monarch_layout.ndim)

    @property
    def placements(self) -> tuple[Any, ...]:
        """The same as torch's DTensor has it: a placement for each axis of the mesh."""
        return self.monarch_layout.placements

    @property
    def partial(self) -> dict[str, str]:
        """Axes along which each rank has a term of the value, with the operation that combines them."""
        return partial_axes(self.monarch_layout.placements, self.monarch_layout.mesh.axes)

    def redistribute(self, spec: Any = None) -> Tensor:
        """Return the tensor sharded differently; gradients flow back sharded as before.

        Args:
            spec: as ``sharding_spec`` of ``monarch.distribute``; None for the whole value on each rank.
        """
        return above.redistribute(self, spec)

    def replicate(self) -> Tensor:
        """Return the tensor with its whole value on each rank: then every op of torch works."""
        return self.redistribute(None)

    def to_local(self) -> Any:
        """Return the shards as a rank-local tensor, which shares their memory; gradients flow back.

        Raises:
            ShapeError: the ranks have shards of different shapes.
        """
        return above.to_local(self)

    def to_mesh(self, mesh: Any, stream: Any = None) -> Any:
        """Return a copy on another mesh of the same sizes, sharded likewise; see ``monarch.to_mesh``."""
        return above.to_mesh(self, mesh, stream)

    def full_tensor(self) -> torch.Tensor:
        """Return the whole value as a plain tensor, on the CPU.

        Raises:
            DeviceMeshError: a rank that has a shard of it has died, or an op that it depends on has failed.
        """
        return above.full_tensor(self)

    def cpu(self, memory_format: Any = torch.preserve_format) -> torch.Tensor:
        """Return the whole value as a plain tensor; see ``full_tensor``."""
        return self.full_tensor()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole value as a NumPy array."""
        if self.requires_grad and not force:
            raise RuntimeError("can't call numpy() on a tensor that requires grad; use tensor.detach().numpy()")
        return self.full_tensor().numpy()

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        """Return the whole value as nested lists."""
        values: Any = self.full_tensor()
        return values.tolist()

    def share_memory_(self) -> NoReturn:
        """Raise: the program has no memory of it."""
        self._refuse("share_memory_")

    def apply_(self, callable: Any) -> NoReturn:
        """Raise: a function of Python does not run on the ranks; ``to_local`` and ``monarch.remote`` take one."""
        self._refuse("apply_")

    def map_(self, other: Any, callable: Any) -> NoReturn:
        """Raise: see ``apply_``."""
        self._refuse("map_")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        values: Any = above.full_tensor(self.detach())
        return values.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    def _refuse(self, name: str) -> NoReturn:
        raise MeshOpError(
            f"{name}: the values of a distributed tensor are on its ranks; full_tensor() returns them to the program, "
            f"and mesh.execute(function, tensor) calls a function on the shard of each rank"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return above.describe(self)

    def _repr_html_(self) -> str:
        """Return a picture of which rank holds which shard."""
        return above.picture(self)

    def __format__(self, format_spec: str) -> str:
        if self.dim() == 0 and format_spec:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("deepcopy: expected a leaf tensor, got one that autograd computed; call detach() first")
        with torch.no_grad():
            copied: Any = self.clone()
        if is_parameter(self):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the whole value, as torch.save of a state dict needs."""
        value: Any = self.full_tensor().requires_grad_(self.requires_grad)
        if is_parameter(self):
            value = torch.nn.Parameter(value, requires_grad=self.requires_grad)
        return value.__reduce_ex__(protocol)


def described(tensor: Tensor) -> str:
    """Return shape, dtype and spec of a tensor, without values."""
    layout = tensor.monarch_layout
    spec = describe_spec(layout.placements, layout.mesh.axes, layout.ndim)
    device = f", device={layout.mesh.kind}" if layout.mesh.kind != "cpu" else ""
    return f"shape={tuple(layout.shape)}, dtype={str(layout.dtype).removeprefix('torch.')}, spec={spec}{device}"
