"""An op on rank-local tensors: what it does is looked up or inferred, then it is appended to the stream of its mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from monarch._core.kinds import is_list, is_tuple
from monarch._engine.dispatching.metadata import floats_matter
from monarch._engine.dispatching.ways import check_results
from monarch._engine.dtensor_compat import (
    check_of_linalg,
    local_scalar,
    same_storage_numel,
    schema_of,
    view_in_place,
    view_out_of_place,
)
from monarch._engine.issuing.encoding import Input, Value
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.seeds import new_seed
from monarch._engine.issuing.stream import Ref
from monarch._engine.layouts.rank_layout import RankLayout, dense_layout
from monarch._engine.local.checking import check_input, local_tensor, mesh_differs, mixed, stream_differs
from monarch._engine.local.looking import item, same_everywhere
from monarch._engine.local.metadata import rank_plan
from monarch._engine.local.tensor import RankTensor
from monarch._engine.tensors.devices import refuse_autocast
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import MeshOpError

if TYPE_CHECKING:
    from monarch._engine.meshes.tensor_mesh import TensorMesh

aten: Any = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default}
"""Ops whose result is the same tensor to the ranks."""
_FILLS = {aten.full.default, aten.scalar_tensor.default}
"""Ops without tensors whose numbers do not change their shape."""
_PLANS = 20_000
"""Signatures to remember; a program with more forgets them all."""


class _Call:
    """The key of an op in the plans of its mesh, and its tensors and numbers."""

    __slots__ = ("floats", "key", "op", "tensors", "values")

    def __init__(self, op: Any, floats: bool) -> None:
        self.op = op
        self.key: list[Any] = [op]
        self.tensors: list[Any] = []
        self.values: list[Any] = []
        self.floats = floats
        """Whether numbers with a fraction change from call to call."""

    def add(self, arg: Any) -> Any:
        """Take an argument, and return it with an Input for each tensor and a Value for each number."""
        kind = arg.__class__
        if kind is RankTensor or isinstance(arg, torch.Tensor):
            tensor: Any = arg if isinstance(arg, RankTensor) else self._converted(arg)
            self.key.append(tensor.monarch_layout if tensor is not None else None)
            self.tensors.append(tensor if tensor is not None else arg)
            return Input(len(self.tensors) - 1)
        if kind is float and self.floats:
            self.key.append(float)
            self.values.append(arg)
            return Value(len(self.values) - 1)
        if is_list(arg) or is_tuple(arg):
            self.key.append(len(arg))
            return [self.add(each) for each in arg]
        if isinstance(arg, torch.Generator):
            raise MeshOpError(
                f"{self.op}: ops on rank-local tensors do not take a generator; set their seed with torch.manual_seed()"
            )
        self.key.append(kind)
        # 0.0 and -0.0 are equal, and differ.
        self.key.append(repr(arg) if kind is float else arg)
        return arg

    def _converted(self, arg: torch.Tensor) -> RankTensor | None:
        """Return a number of the program as a tensor, once the mesh is known; raise for other tensors."""
        if isinstance(arg, Tensor):
            raise mixed(self.op)
        if arg.dim() or arg.requires_grad:
            raise local_tensor(self.op, arg)
        return None


def dispatch(op: Any, args: Any, kwargs: Any) -> Any:
    """Issue an op with at least one rank-local tensor, and return its results, whose values come later."""
    __tracebackhide__ = True
    if op in _ALIASES:
        check_input(op, args[0])
        return _alias(args[0])
    special = _SPECIAL.get(op)
    if special is not None:
        return special(args)
    if torch.Tag.inplace_view in op.tags:
        return _in_place_view(op, args, kwargs)
    if op is check_of_linalg and args[0].monarch_vouches and args[0].monarch_stream is None:
        return check_results(args, kwargs)[1]
    call = _Call(op, not floats_matter(op))
    skeleton = tuple([call.add(arg) for arg in args])
    mesh = None
    stream = None
    for tensor in call.tensors:
        if isinstance(tensor, RankTensor):
            check_input(op, tensor)
            if mesh is None:
                mesh, stream = tensor.monarch_layout.mesh, tensor.monarch_stream
            elif tensor.monarch_layout.mesh is not mesh:
                raise mesh_differs(op, call.tensors)
            elif tensor.monarch_stream is not stream:
                raise stream_differs(op, call.tensors)
    named = {}
    if kwargs:
        named = {key: call.add(arg) for key, arg in _on_device(op, kwargs, mesh, call).items()}
    if mesh is None:
        mesh = call.tensors[0].monarch_layout.mesh
    refuse_autocast(mesh.kind)
    return _issue(mesh, call, skeleton, named, stream)


def make(mesh: TensorMesh, stream: Any, op: Any, args: Any, kwargs: Any) -> Any:
    """Issue an op without tensors, which makes one on each rank."""
    __tracebackhide__ = True
    call = _Call(op, op in _FILLS)
    skeleton = tuple([call.add(arg) for arg in args])
    named = {key: call.add(arg) for key, arg in _on_device(op, kwargs, mesh, call).items()}
    if "device" not in named and any(each.name == "device" for each in schema_of(op).arguments):
        named["device"] = mesh.device
    return _issue(mesh, call, skeleton, named, stream)


def constant(mesh: TensorMesh, stream: Any, value: torch.Tensor) -> RankTensor:
    """Return a value of the program as a tensor of each rank."""
    if not value.dim():
        return make(mesh, stream, aten.full.default, ([], value.item()), {"dtype": value.dtype})
    result = RankTensor(Ref(mesh.stream, dense_layout(mesh, value.shape, value.dtype)), _dense(mesh, value), stream)
    with mesh.stream.order.together():
        sent = mesh.actors.put_rank.call(result.monarch_ref.number, value.detach().contiguous(), mesh.region)
    mesh.stream.follow(sent)
    return result


def _dense(mesh: TensorMesh, value: torch.Tensor) -> RankLayout:
    return dense_layout(mesh, value.shape, value.dtype)


def _alias(tensor: RankTensor) -> RankTensor:
    alias = RankTensor(tensor.monarch_ref, tensor.monarch_layout, tensor.monarch_stream)
    alias.monarch_loan = tensor.monarch_loan
    return alias


def _issue(mesh: TensorMesh, call: _Call, skeleton: Any, named: Any, stream: Any) -> Any:
    __tracebackhide__ = True
    tensors = call.tensors
    for at, each in enumerate(tensors):
        if not isinstance(each, RankTensor):
            tensors[at] = constant(mesh, stream, each)
            call.key.append(tensors[at].monarch_layout)
    call.key.append(tuple(named))
    number = stream.number if stream is not None else 0
    call.key.append(number)
    key: Any = ("rank", *call.key)
    try:
        known = mesh.plans.get(key)
    except TypeError:
        key, known = None, None
    if known is None:
        known = rank_plan(mesh, call.op, skeleton, named, [each.monarch_layout for each in tensors], number)
        if key is not None:
            if len(mesh.plans) > _PLANS:
                mesh.plans.clear()
            mesh.plans[key] = known
    for index in known.writes:
        _check_write(call.op, tensors[index])
    return _appended(mesh, known, tensors, tuple(call.values), stream)


def _check_write(op: Any, tensor: RankTensor) -> None:
    loan = tensor.monarch_loan
    if loan is not None and not loan.mutable:
        raise MeshOpError(
            f"{op} would change a tensor that is borrowed read-only; borrow it with borrow(..., mutable=True)"
        )


def _appended(mesh: TensorMesh, known: Any, tensors: list[RankTensor], values: tuple[Any, ...], stream: Any) -> Any:
    results: list[Any] = []
    numbers: list[int] = []
    for result in known.results:
        if result.__class__ is RankLayout:
            ref = Ref(mesh.stream, result)
            numbers.append(ref.number)
            results.append(RankTensor(ref, result, stream))
        else:
            numbers.append(0)
            results.append(tensors[result] if result is not None else None)
    if known.is_random:
        values = (*values, new_seed())
    inputs = tuple([tensor.monarch_ref.number for tensor in tensors])
    mesh.stream.issue(known.template, inputs, values, tuple(numbers), lines.here())
    if known.info >= 0:
        results[known.info].monarch_vouches = tuple(results[: known.info])
    if known.form == "one":
        return results[0]
    if known.form == "tuple":
        return tuple(results)
    return results if known.form == "list" else None


def _on_device(op: Any, kwargs: dict[str, Any], mesh: TensorMesh | None, call: _Call) -> dict[str, Any]:
    """Return keyword arguments with the device of the mesh; raise for another one."""
    kept = {key: arg for key, arg in kwargs.items() if key != "pin_memory" or arg}
    wanted = kept.get("device")
    if wanted is None:
        return kept
    own = mesh or call.tensors[0].monarch_layout.mesh
    if torch.device(wanted).type not in ("cpu", own.kind):
        raise MeshOpError(
            f"{op}: device={str(wanted)!r}: a rank-local tensor stays on the devices of its ranks ({own.kind}); "
            f"monarch.inspect(tensor) returns the value of a rank to the program"
        )
    return {**kept, "device": own.device}


def _in_place_view(op: Any, args: Any, kwargs: Any) -> RankTensor:
    """Give a tensor another shape in place, as ``squeeze_`` does: it becomes the view, and its aliases stay."""
    tensor: Any = args[0]
    if not isinstance(tensor, RankTensor):
        raise local_tensor(op, tensor)
    outer = view_out_of_place(op)
    if outer is None:
        raise MeshOpError(f"{op}: a rank-local tensor cannot be resized; make a new one")
    view: RankTensor = dispatch(outer, (_alias(tensor), *args[1:]), kwargs)
    view_in_place(op, tensor, args[1:], kwargs)
    tensor.monarch_ref, tensor.monarch_layout = view.monarch_ref, view.monarch_layout
    return tensor


def _item(args: Any) -> Any:
    return item(args[0])


def _equal(args: Any) -> bool:
    if args[0].shape != args[1].shape:
        return False
    equal: Any = torch.eq(args[0], args[1]).all()
    return same_everywhere(equal, "torch.equal")


def _all_close(args: Any) -> bool:
    close: Any = torch.isclose(*args).all()
    return same_everywhere(close, "torch.allclose")


def _not_pinned(args: Any) -> bool:
    return False


def _same_size(args: Any) -> bool:
    return args[0].shape == args[1].shape


def _same_storage(args: Any) -> bool:
    return args[0].numel() == args[1].numel()


def _copy(args: Any) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, Tensor) or isinstance(source, Tensor):
        raise mixed(aten.copy_.default)
    if not isinstance(target, RankTensor):
        raise MeshOpError(
            "copy_: a plain tensor cannot take the values of all ranks; "
            "copy the value of one rank, as in target.copy_(monarch.inspect(tensor))"
        )
    if not isinstance(source, RankTensor):
        # As load_state_dict does: each rank gets the value.
        check_input(aten.copy_.default, target)
        value = source.detach().to(target.dtype).expand(target.shape)
        source = constant(target.monarch_layout.mesh, target.monarch_stream, value)
    call = _Call(aten.copy_.default, True)
    for each in (target, source):
        check_input(call.op, each)
    skeleton = tuple([call.add(each) for each in (target, source)])
    if source.monarch_layout.mesh is not target.monarch_layout.mesh:
        raise mesh_differs(call.op, call.tensors)
    if source.monarch_stream is not target.monarch_stream:
        raise stream_differs(call.op, call.tensors)
    return _issue(target.monarch_layout.mesh, call, skeleton, {}, target.monarch_stream)


_SPECIAL: dict[Any, Any] = {
    aten.item.default: _item,
    local_scalar: _item,
    aten.is_nonzero.default: _item,
    aten.equal.default: _equal,
    aten.allclose.default: _all_close,
    aten.copy_.default: _copy,
    aten.is_pinned.default: _not_pinned,
    aten.is_same_size.default: _same_size,
    same_storage_numel: _same_storage,
}
"""Ops with another way than the stream."""
