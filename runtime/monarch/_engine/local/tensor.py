"""A rank-local tensor, as the program sees it: metadata and a reference. Each rank holds a plain tensor."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from monarch._engine.dtensor_compat import is_parameter, no_torch_function, wrapper
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.observer import current
from monarch._engine.layouts.rank_layout import RankLayout
from monarch._engine.tensors.devices import OnRanks
from monarch.exceptions import MeshOpError

if TYPE_CHECKING:
    from monarch._engine.issuing.stream import Ref


class Above:
    """Functions of files above this one, which need the class below; ``wiring.py`` sets them."""

    dispatch: Any
    item: Any
    reduce: Any
    reduce_: Any
    slice_mesh: Any
    to_mesh: Any
    main: Any
    argument: Any


above = Above()


class RankTensor(OnRanks, torch.Tensor):
    """One tensor on each rank of a mesh, of equal shapes and with different values. The ranks compute independently.

    Made by torch's functions in ``with mesh.activate():``, by ``monarch.remote`` functions, or from a tensor that is
    sharded over the mesh by ``to_local()``. Ops return at once. ``monarch.inspect`` waits for the value of a rank.
    """

    monarch_ref: Ref
    monarch_layout: RankLayout
    monarch_stream: Any
    """The Stream, see streams.py, which is above this file; None for the main one."""
    monarch_dropped: str
    """Where the program has dropped it; empty before."""
    monarch_loan: Any
    """For a tensor on loan from another stream, its Borrow."""
    monarch_vouches: tuple[RankTensor, ...] = ()
    """For what tells whether an op of ``torch.linalg`` has succeeded, its results."""
    monarch_loans: int
    """Open mutable borrows of it."""

    @staticmethod
    def __new__(cls: Any, ref: Ref, layout: RankLayout, stream: Any = None) -> RankTensor:
        if current.observer is not None:
            current.observer.local()
        made = wrapper(cls, layout.shape, layout.stride, layout.dtype, layout.mesh.device, False)
        made.monarch_ref = ref
        made.monarch_layout = layout
        made.monarch_stream = stream
        made.monarch_dropped = ""
        made.monarch_loan = None
        made.monarch_loans = 0
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # Ops of torch go straight to __torch_dispatch__.
    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        return above.dispatch(func, args, kwargs or {})

    @property
    def mesh(self) -> Any:
        """The mesh whose ranks hold it."""
        return self.monarch_layout.mesh.public

    @property
    def stream(self) -> Any:
        """The stream that computes with it."""
        return self.monarch_stream or above.main

    @property
    def dropped(self) -> bool:
        """Whether ``drop`` was called."""
        return bool(self.monarch_dropped)

    def drop(self) -> None:
        """Free the memory on the ranks; later uses raise."""
        self.monarch_dropped = self.monarch_dropped or str(lines[lines.here()])
        # Not in the type, because only a dropped tensor has none.
        self.monarch_ref = None  # pyright: ignore[reportAttributeAccessIssue]

    def reduce(self, dims: Any = None, reduction: str = "sum", scatter: bool = False, mesh: Any = None) -> RankTensor:
        """Combine the tensors of the ranks along axes of the mesh; see ``monarch.reduce``."""
        return above.reduce(self, dims, reduction, scatter, mesh)

    def reduce_(self, dims: Any = None, reduction: str = "sum", scatter: bool = False, mesh: Any = None) -> RankTensor:
        """Combine the tensors of the ranks in place; see ``monarch.reduce_``."""
        return above.reduce_(self, dims, reduction, scatter, mesh)

    def slice_mesh(self, **coordinates: Any) -> RankTensor:
        """Return the tensors of some ranks; see ``monarch.slice_mesh``."""
        return above.slice_mesh(self, **coordinates)

    def to_mesh(self, mesh: Any, stream: Any = None) -> RankTensor:
        """Return a copy on another mesh; see ``monarch.to_mesh``."""
        return above.to_mesh(self, mesh, stream)

    def item(self) -> Any:
        """Return the number in tensors of one element, if it is the same on all ranks.

        Raises:
            MeshOpError: the ranks have different numbers.
        """
        return above.item(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Raise: each rank has a value of its own."""
        _refuse_value("numpy()")

    def tolist(self) -> Any:
        """Raise: each rank has a value of its own."""
        _refuse_value("tolist()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_value("numpy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RankTensor({described(self)}, mesh={self.mesh!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.dim() == 0 and format_spec else object.__format__(self, "")

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

    def monarch_argument(self) -> tuple[Any, ...]:
        """Return what stands for it in a message to actors: see arguments.py. The pickler of messages calls it."""
        return above.argument(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MeshOpError(
            "a rank-local tensor cannot be pickled, because each rank has its own value; save one rank's value, as in "
            "torch.save(monarch.inspect(tensor), file)"
        )


def _refuse_value(what: str) -> NoReturn:
    raise MeshOpError(f"{what}: each rank has its own value; choose one, as in monarch.inspect(tensor, gpus=0).{what}")


def described(tensor: RankTensor) -> str:
    """Return shape and dtype of a tensor."""
    layout = tensor.monarch_layout
    device = f", device={layout.mesh.kind}" if layout.mesh.kind != "cpu" else ""
    return f"shape={tuple(layout.shape)}, dtype={str(layout.dtype).removeprefix('torch.')}{device}"
