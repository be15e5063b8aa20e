"""An op on tensors of a mesh: what it does is looked up or inferred, then it is appended to the stream."""

from __future__ import annotations

from itertools import count
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed.tensor import Replicate

from monarch._engine.dispatching.metadata import NoRuleError, floats_matter, plan
from monarch._engine.dispatching.ways import ways
from monarch._engine.dtensor_compat import (
    lazy_conjugate,
    lazy_negative,
    local_scalar,
    same_storage_numel,
    schema_of,
    tree_map,
    unscale,
    view_in_place,
    view_out_of_place,
)
from monarch._engine.issuing.encoding import Input, Value
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.observer import current
from monarch._engine.issuing.seeds import new_seed
from monarch._engine.issuing.stream import Ref
from monarch._engine.layouts.layout import Layout
from monarch._engine.layouts.specs import placements_of, without_partial
from monarch._engine.tensors.copied_views import note_origin, write_back
from monarch._engine.tensors.devices import refuse_autocast
from monarch._engine.tensors.tensor import Tensor, described
from monarch._engine.values.distributing import distribute_to
from monarch._engine.values.fetching import item
from monarch._engine.values.redistribution import moved
from monarch.exceptions import MeshOpError

if TYPE_CHECKING:
    from monarch._engine.meshes.tensor_mesh import TensorMesh

aten: Any = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default}
"""Ops whose result is the same tensor to the ranks."""
_IMPLICIT = 1 << 20
"""Bytes of a tensor of the program that an op takes as it is, on each rank."""
_ALONE = 2
"""References to the reference of a tensor that has no alias: its own and that of the count."""
_PLANS = 20_000
"""Signatures to remember; a program with more forgets them all."""


class _Kind(NamedTuple):
    """An op, looked at once: hashing one takes as long as the rest of a look.

    Attributes:
        number: stands for the op in signatures.
        is_alias: whether its result is the same tensor to the ranks.
        is_view_in_place: whether it gives a tensor another shape.
        special: another way than the stream; None for the usual one.
        floats: whether numbers with a fraction leave its metadata alone.
    """

    number: int
    is_alias: bool
    is_view_in_place: bool
    special: Any
    floats: bool


_kinds: dict[Any, _Kind] = {}
"""By op; single operations of a dict, from any thread."""
_numbers = count()


def _kind_of(op: Any) -> _Kind:
    special = _SPECIAL.get(op)
    is_view = special is None and torch.Tag.inplace_view in op.tags
    # setdefault, so that two threads get the same one.
    return _kinds.setdefault(op, _Kind(next(_numbers), op in _ALIASES, is_view, special, not floats_matter(op)))


class _Signature:
    """The key of an op in the plans of its mesh, and its tensors and numbers."""

    __slots__ = ("floats", "is_mixed", "key", "tensors", "values")

    def __init__(self, kind: _Kind) -> None:
        self.key: list[Any] = [kind.number]
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []
        self.is_mixed = False
        """Whether some tensors are the program's."""
        self.floats = kind.floats

    def add(self, arg: Any) -> None:
        kind = arg.__class__
        key = self.key
        if kind is Tensor:
            key.append(arg.monarch_layout)
            self.tensors.append(arg)
        elif kind is float and self.floats:
            key.append(float)
            self.values.append(arg)
        elif kind is list or kind is tuple:
            key.append(len(arg))
            for each in arg:
                self.add(each)
        elif kind is int or kind is bool:
            key.append(kind)
            key.append(arg)
        elif isinstance(arg, torch.Tensor):
            self._add_tensor(arg)
        elif isinstance(arg, torch.Generator):
            raise MeshOpError(
                "ops on tensors of a mesh do not take a generator; set their seed with torch.manual_seed()"
            )
        else:
            key.append(arg)

    def _add_tensor(self, arg: Any) -> None:
        if isinstance(arg, Tensor):
            self.key.append(arg.monarch_layout)
            self.tensors.append(arg)
            return
        self.is_mixed = True
        self.tensors.append(arg)


def _items(arg: Any) -> Any:
    return arg


def _skeleton(arg: Any, tensors: list[int], values: list[int], floats: bool) -> Any:
    """Return an argument with an Input for each tensor and a Value for each number, counted from the left."""
    if isinstance(arg, torch.Tensor):
        tensors[0] += 1
        return Input(tensors[0] - 1)
    if arg.__class__ is float and floats:
        values[0] += 1
        return Value(values[0] - 1)
    if isinstance(arg, list | tuple):
        return [_skeleton(each, tensors, values, floats) for each in _items(arg)]
    return arg


def dispatch(op: Any, args: Any, kwargs: Any) -> Any:
    """Issue an op and return its results, whose values come later."""
    __tracebackhide__ = True
    kind = _kinds.get(op) or _kind_of(op)
    if kind.is_alias:
        tensor: Tensor = args[0]
        alias = Tensor(tensor.monarch_ref, tensor.monarch_layout)
        alias.monarch_origin = tensor.monarch_origin
        return alias
    if kind.is_view_in_place:
        return _in_place_view(op, args, kwargs)
    if kind.special is not None:
        done, result = kind.special(args, kwargs)
        if done:
            return result
    return _ordinary(kind, op, args, kwargs)


def _ordinary(kind: _Kind, op: Any, args: Any, kwargs: Any) -> Any:
    """Issue an op that goes to the ranks as it is."""
    __tracebackhide__ = True
    signature = _Signature(kind)
    add = signature.add
    for arg in args:
        add(arg)
    if kwargs:
        if str(kwargs.get("device")) == "meta":
            return _on_meta(op, args, kwargs)
        kwargs = _devices(signature, args, kwargs)
        for name, arg in kwargs.items():
            signature.key.append(name)
            add(arg)
    tensors = signature.tensors
    mesh = _mesh_of(op, tensors)
    if mesh.kind != "cpu":
        refuse_autocast(mesh.kind)
    if signature.is_mixed:
        args, kwargs, tensors = _replicated(mesh, op, args, kwargs, signature)
    try:
        key = tuple(signature.key)
        known = mesh.plans.get(key)
    except TypeError:
        key, known = None, None
    if known is None:
        if _combine_terms(op, tensors):
            return dispatch(op, args, kwargs)
        known = _plan(mesh, op, args, kwargs, tensors, signature.floats)
        if key is not None:
            if len(mesh.plans) > _PLANS:
                mesh.plans.clear()
            mesh.plans[key] = known
    values = tuple(signature.values)
    if known.is_random:
        values = (*values, new_seed())
    return _issue(mesh, known, tensors, values, op, args)


def _issue(mesh: TensorMesh, known: Any, tensors: list[Tensor], values: tuple[Any, ...], op: Any, args: Any) -> Any:
    stream = mesh.stream
    results: list[Any] = []
    numbers: list[int] = []
    for result in known.results:
        if result.__class__ is Layout:
            ref = Ref(stream, result)
            numbers.append(ref.number)
            results.append(Tensor(ref, result))
        else:
            numbers.append(0)
            results.append(tensors[result] if result is not None else None)
    held: list[Any] = tensors
    inputs = tuple([tensor.monarch_ref.number for tensor in held])
    stream.issue(known.template, inputs, values, tuple(numbers), lines.here())
    if known.writes:
        for index in known.writes:
            write_back(held[index])
    elif known.is_copy or (known.is_view and held[0].monarch_origin is not None):
        note_origin(results, tensors[0], op, args, known.is_copy)
    if known.info >= 0:
        results[known.info].monarch_vouches = tuple(results[: known.info])
    if known.form == "one":
        return results[0]
    if known.form == "tuple":
        return tuple(results)
    return results if known.form == "list" else None


def _in_place_view(op: Any, args: Any, kwargs: Any) -> Tensor:
    """Give a tensor another shape in place, as ``squeeze_`` does: it becomes the view, and its aliases stay."""
    tensor: Any = args[0]
    if not isinstance(tensor, Tensor):
        raise MeshOpError(f"{op} cannot give a tensor of the program the shape of a tensor of a mesh")
    outer = view_out_of_place(op)
    if outer is None:
        raise MeshOpError(f"{op}: a tensor of a mesh cannot be resized; make a new one")
    base = Tensor(tensor.monarch_ref, tensor.monarch_layout)
    base.monarch_origin = tensor.monarch_origin
    view: Tensor = dispatch(outer, (base, *args[1:]), kwargs)
    view_in_place(op, tensor, args[1:], kwargs)
    tensor.monarch_ref, tensor.monarch_layout = view.monarch_ref, view.monarch_layout
    tensor.monarch_origin = view.monarch_origin
    return tensor


def _combine_terms(op: Any, tensors: list[Tensor]) -> bool:
    """Combine the terms of a tensor that an op changes in place, if it cannot change terms.

    Only one that no alias shares: it stays as it was. torch refuses all.
    """
    if not tensors or not schema_of(op).is_mutable or schema_of(op).name.endswith(("zero_", "copy_")):
        return False
    target = tensors[0]
    plain = without_partial(target.placements)
    if plain == target.placements or target.monarch_origin is not None or getrefcount(target.monarch_ref) > _ALONE:
        return False
    whole = moved(target, plain)
    target.monarch_ref, target.monarch_layout = whole.monarch_ref, whole.monarch_layout
    return True


def _plan(mesh: TensorMesh, op: Any, args: Any, kwargs: Any, tensors: list[Tensor], floats: bool) -> Any:
    __tracebackhide__ = True
    counts, numbers = [0], [0]
    skeleton = tuple(_skeleton(arg, counts, numbers, floats) for arg in args)
    named = {key: _skeleton(arg, counts, numbers, floats) for key, arg in kwargs.items()}
    try:
        return plan(mesh, op, skeleton, named, [tensor.monarch_layout for tensor in tensors])
    except NoRuleError as error:
        what = "; ".join(described(tensor) for tensor in tensors)
        raise MeshOpError(
            f"{op} cannot run on tensors that are sharded over a mesh: {str(error).rstrip('.')}. Its tensors: {what}. "
            f"Issued at {lines[lines.here()]}\n{error.advice}"
        ) from None


def _mesh_of(op: Any, tensors: list[Tensor]) -> TensorMesh:
    mesh: TensorMesh | None = None
    for tensor in tensors:
        layout = getattr(tensor, "monarch_layout", None)
        if layout is None:
            continue
        if mesh is None:
            mesh = layout.mesh
        elif mesh is not layout.mesh:
            raise MeshOpError(
                f"{op}: its tensors are on different meshes, {mesh!r} and {layout.mesh!r}; move one of them with "
                f"monarch.distribute(tensor.full_tensor(), mesh, spec)"
            )
    assert mesh is not None
    return mesh


def _replicated(mesh: TensorMesh, op: Any, args: Any, kwargs: Any, signature: _Signature) -> Any:
    """Give tensors of the program to each rank, if they are small."""
    found: dict[int, Tensor] = {}

    def convert(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and not isinstance(arg, Tensor):
            made = found.get(id(arg))
            if made is None:
                made = found[id(arg)] = _implicit(mesh, op, arg)
            return made
        if isinstance(arg, list | tuple):
            return [convert(each) for each in _items(arg)]
        return arg

    args = [convert(arg) for arg in args]
    kwargs = {key: convert(arg) for key, arg in kwargs.items()}
    again = _Signature(_kinds[op])
    for arg in args:
        again.add(arg)
    for name, arg in kwargs.items():
        again.key.append(name)
        again.add(arg)
    signature.key = again.key
    return args, kwargs, again.tensors


def _implicit(mesh: TensorMesh, op: Any, arg: torch.Tensor) -> Tensor:
    size = arg.numel() * arg.element_size()
    if size > _IMPLICIT:
        raise MeshOpError(
            f"{op}: mixes distributed tensors with a local tensor of {size / 1e6:.1f} MB and shape {tuple(arg.shape)}; "
            f"distribute it once with monarch.distribute(tensor, mesh, spec)"
        )
    number = current.observer.number_in(arg) if current.observer is not None else None
    if number is not None:
        layout = mesh.layouts.dense(arg.shape, arg.dtype, placements_of(None, mesh.axes, arg.dim()))
        made = mesh.make(layout)
        mesh.issue("make", ("full", tuple(arg.shape), arg.dtype, layout.placements), (), (number,), (made,))
        return made
    return distribute_to(mesh, arg.detach(), None)


def _on_meta(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op whose result has no values, which torch.func and ``tensor.to("meta")`` ask for."""

    def bare(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return op(*tree_map(bare, args), **tree_map(bare, kwargs))


def _devices(signature: _Signature, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the device of the mesh; raise for another one."""
    device = kwargs.get("device")
    if device is None:
        return {key: arg for key, arg in kwargs.items() if key not in ("pin_memory",) or arg}
    mesh = _mesh_of("device", signature.tensors)
    wanted = torch.device(device)
    if wanted.type not in ("cpu", mesh.kind):
        raise MeshOpError(
            f"device={str(device)!r}: a tensor of a mesh stays on the devices of its ranks ({mesh.kind}); "
            f"full_tensor() returns its value to the program"
        )
    return {**{key: arg for key, arg in kwargs.items() if key != "pin_memory" or arg}, "device": mesh.device}


def _local_scalar(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, item(args[0])


def _equal(args: Any, kwargs: Any) -> tuple[bool, Any]:
    if args[0].shape != args[1].shape:
        return True, False
    return True, bool(torch.eq(args[0], args[1]).all().item())


def _all_close(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, bool(torch.isclose(*args, **kwargs).all().item())


def _copy(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Copy between a tensor of the mesh and one of the program, each sharded as its target."""
    target, source = args[0], args[1]
    if not isinstance(target, Tensor):
        return True, target.copy_(source.full_tensor())
    if isinstance(source, Tensor):
        return False, None
    layout = target.monarch_layout
    value = source.detach().expand(layout.shape)
    if value.dtype != layout.dtype:
        value = value.to(layout.dtype)
    return True, target.copy_(distribute_to(layout.mesh, value, layout.placements))


def _fill(args: Any, kwargs: Any) -> tuple[bool, Any]:
    target, value = args
    return True, target.copy_(value.expand(target.shape)) if isinstance(value, Tensor) else target.fill_(value.item())


def _unbind(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Gather the dim that is taken apart, for which torch has no rule."""
    tensor, dim = args[0], args[1] if len(args) > 1 else 0
    placements = tensor.monarch_layout.placements
    whole = tuple(Replicate() if each.is_shard(dim % tensor.dim()) else each for each in placements)
    if whole == placements:
        return False, None
    views = [aten.select.int(tensor, dim, at) for at in range(tensor.shape[dim])]
    return True, views


def _same_size(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, args[0].shape == args[1].shape


def _not_pinned(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, False


def _same_storage(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, args[0].numel() == args[1].numel()


def _conjugated(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Compute the values at once, as a copy does: a tensor without memory has no bit for lazy ones."""
    return True, aten.clone.default(_ordinary(_kind_of(lazy_conjugate), lazy_conjugate, args, kwargs))


def _negated(args: Any, kwargs: Any) -> tuple[bool, Any]:
    return True, aten.clone.default(_ordinary(_kind_of(lazy_negative), lazy_negative, args, kwargs))


def _unscaled(args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Divide gradients by the scale of a GradScaler, whose state is the program's."""
    grads, found_inf, inverse = args
    if isinstance(found_inf, Tensor):
        return False, None
    factor = inverse.item()
    finite = [torch.isfinite(grad).all() for grad in grads]
    for grad in grads:
        grad.mul_(factor)
    if not torch.stack(finite).all().item():
        found_inf.fill_(1.0)
    return True, None


_MEAN, _SUM = 1, 2
"""Reductions of losses, as torch numbers them."""


def _mean_loss(op: Any, backward: bool) -> Any:
    """Return the way of a loss or its gradient, for whose mean torch takes the sizes of parts for those of the whole.

    It runs as a sum, which is then sharded.
    """
    at = next(place for place, each in enumerate(schema_of(op).arguments) if each.name == "reduction")

    def loss(args: Any, kwargs: Any) -> tuple[bool, Any]:
        first = 1 if backward else 0
        reduction = args[at] if len(args) > at else kwargs.get("reduction", _MEAN)
        tensors = [each for each in args[: at + 1] if isinstance(each, Tensor)]
        if reduction != _MEAN or not any(each.is_shard() for tensor in tensors for each in tensor.placements):
            return False, None
        count = int(cast("Any", torch).broadcast_shapes(args[first].shape, args[first + 1].shape).numel())
        if not count:
            return False, None
        named = {key: each for key, each in kwargs.items() if key != "reduction"}
        middle = [*args[:at], *[None] * (at - len(args))]
        if backward:
            middle[0] = aten.div.Scalar(args[0], count)
        result = op(*middle, _SUM, *args[at + 1 :], **named)
        return True, result if backward else aten.div.Scalar(result, count)

    return loss


_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_SPECIAL: dict[Any, Any] = {
    **{op: _mean_loss(op, False) for op in [getattr(aten, each).default for each in _LOSSES]},
    **{op: _mean_loss(op, True) for op in [getattr(aten, f"{each}_backward").default for each in _LOSSES]},
    aten.binary_cross_entropy_with_logits.default: _mean_loss(aten.binary_cross_entropy_with_logits.default, False),
    unscale: _unscaled,
    lazy_conjugate: _conjugated,
    lazy_negative: _negated,
    aten.item.default: _local_scalar,
    same_storage_numel: _same_storage,
    local_scalar: _local_scalar,
    aten.equal.default: _equal,
    aten.allclose.default: _all_close,
    aten.is_nonzero.default: _local_scalar,
    aten.copy_.default: _copy,
    aten.fill_.Tensor: _fill,
    aten.unbind.int: _unbind,
    aten.is_same_size.default: _same_size,
    aten.is_pinned.default: _not_pinned,
    **ways(lambda op, args, kwargs: _ordinary(_kind_of(op), op, args, kwargs)),
}
"""Ops with another way than the stream; each returns whether it is done, and its result."""
