"""An op on distributed tensors: what it does is looked up or inferred, then it is appended to the stream."""

from __future__ import annotations

from itertools import count
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch

from monarch._engine.dispatching.metadata import NoRuleError, floats_matter, plan
from monarch._engine.dispatching.program_arguments import mesh_of, on_meta, replicated, with_device
from monarch._engine.dispatching.signatures import OpSignature, Signature, skeleton
from monarch._engine.dispatching.special import special_ops
from monarch._engine.dispatching.ways import ways
from monarch._engine.dtensor_compat import schema_of, view_in_place, view_out_of_place
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.seeds import new_seed
from monarch._engine.issuing.stream import Ref
from monarch._engine.layouts.layout import Layout
from monarch._engine.layouts.specs import without_partial
from monarch._engine.tensors.copied_views import note_origin, write_back
from monarch._engine.tensors.devices import refuse_autocast
from monarch._engine.tensors.tensor import Tensor, described
from monarch._engine.values.redistribution import moved
from monarch.exceptions import MeshOpError

if TYPE_CHECKING:
    from monarch._engine.meshes.tensor_mesh import TensorMesh

aten: Any = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default}
"""Ops whose result is the same tensor to the ranks."""
_ALONE = 2
"""References to the reference of a tensor that has no alias: its own and that of the count."""
_PLANS = 20_000
"""Signatures to remember; a program with more forgets them all."""
_kinds: dict[Any, OpSignature] = {}
"""By op; single operations of a dict, from any thread."""
_numbers = count()


def _kind_of(op: Any) -> OpSignature:
    special = _SPECIAL.get(op)
    is_view = special is None and torch.Tag.inplace_view in op.tags
    # setdefault, so that two threads get the same one.
    return _kinds.setdefault(op, OpSignature(next(_numbers), op in _ALIASES, is_view, special, not floats_matter(op)))


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


def _ordinary(kind: OpSignature, op: Any, args: Any, kwargs: Any) -> Any:
    """Issue an op that goes to the ranks as it is."""
    __tracebackhide__ = True
    signature = Signature(kind)
    add = signature.add
    for arg in args:
        add(arg)
    if kwargs:
        if str(kwargs.get("device")) == "meta":
            return on_meta(op, args, kwargs)
        kwargs = with_device(signature, args, kwargs)
        for name, arg in kwargs.items():
            signature.key.append(name)
            add(arg)
    tensors = signature.tensors
    mesh = mesh_of(op, tensors)
    if mesh.kind != "cpu":
        refuse_autocast(mesh.kind)
    if signature.is_mixed:
        args, kwargs, tensors = replicated(mesh, op, args, kwargs, signature, kind)
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
        raise MeshOpError(f"{op} cannot give a plain tensor the shape of a distributed tensor")
    outer = view_out_of_place(op)
    if outer is None:
        raise MeshOpError(f"{op}: a distributed tensor cannot be resized; make a new one")
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
    positional = tuple(skeleton(arg, counts, numbers, floats) for arg in args)
    named = {key: skeleton(arg, counts, numbers, floats) for key, arg in kwargs.items()}
    try:
        return plan(mesh, op, positional, named, [tensor.monarch_layout for tensor in tensors])
    except NoRuleError as error:
        what = "; ".join(described(tensor) for tensor in tensors)
        raise MeshOpError(
            f"{op} cannot run on distributed tensors: {str(error).rstrip('.')}. Its tensors: {what}. "
            f"Issued at {lines[lines.here()]}\n{error.advice}"
        ) from None


def _as_it_is(op: Any, args: Any, kwargs: Any) -> Any:
    __tracebackhide__ = True
    return _ordinary(_kind_of(op), op, args, kwargs)


_SPECIAL: dict[Any, Any] = {**special_ops(_as_it_is), **ways(_as_it_is)}
"""Ops with another way than the stream; each returns whether it is done, and its result."""
