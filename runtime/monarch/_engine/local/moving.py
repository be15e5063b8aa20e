"""``to_mesh``: a copy of a tensor on another mesh, from rank to rank."""

from __future__ import annotations

from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch

from monarch._core.kinds import is_a
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import tree_map
from monarch._engine.issuing.encoding import Input, Template
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.observer import current
from monarch._engine.issuing.stream import OpStream, Ref
from monarch._engine.layouts.rank_layout import dense_layout
from monarch._engine.layouts.specs import without_partial
from monarch._engine.local.checking import check_input
from monarch._engine.local.movers import Movers
from monarch._engine.local.reducing import reduce
from monarch._engine.local.slicing import slice_mesh
from monarch._engine.local.streams import Stream
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh, tensor_mesh_of
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.fetching import shard_of
from monarch._engine.values.redistribution import to_placements
from monarch._meshes.inside import node_of, state_of, view_at
from monarch.exceptions import ArgumentError, MeshOpError, ShapeError


class _MovedRef(Ref):
    """A reference that the ranks of the mesh it comes from know too."""

    __slots__ = ("_source",)

    def __init__(self, stream: OpStream, layout: Any, source: OpStream) -> None:
        super().__init__(stream, layout)
        self._source = source

    def __del__(self) -> None:
        super().__del__()
        self._source.pending.append(self.number)


class _Route(NamedTuple):
    """How tensors get from a mesh to another one.

    Attributes:
        missing: axes of the target that the source does not have: each of their ranks gets the same.
        takers: how many ranks read from a base rank of the source.
        sources: the base rank from which one of the target reads.
        movers: by base rank of the source the actor that answers; None for the same process.
    """

    missing: tuple[str, ...]
    takers: dict[int, int]
    sources: dict[int, int]
    movers: dict[int, Any]


_routes: WeakKeyDictionary[TensorMesh, WeakKeyDictionary[TensorMesh, _Route]] = WeakKeyDictionary()
"""By source and target; single operations, from any thread: two of them find the same."""
_templates: WeakKeyDictionary[TensorMesh, dict[Any, int]] = WeakKeyDictionary()
"""Templates of a mesh by what they do; likewise."""


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, target: TensorMesh, stream: Stream | None) -> Any:
        ctx.source = tensor.monarch_layout.mesh
        ctx.stream = tensor.monarch_stream if isinstance(tensor, RankTensor) else None
        ctx.placements = without_partial(tensor.placements) if isinstance(tensor, Tensor) else None
        return _copied(tensor, target, stream)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        with torch.no_grad():
            if ctx.placements is not None:
                grad = to_placements(grad, ctx.placements)
            else:
                missing = _route(ctx.source, grad.monarch_layout.mesh).missing
                if missing:
                    grad = slice_mesh(reduce(grad, missing), **dict.fromkeys(missing, 0))
            return _copied(grad, ctx.source, ctx.stream), None, None


def to_mesh(tensors: Any, mesh: Any, stream: Stream | None = None) -> Any:
    """Return copies of tensors on another mesh: each rank gets what the rank at the same place has.

    The copy has the values of this moment; ops on both meshes continue meanwhile. Gradients flow back the same way.

    Args:
        tensors: a rank-local tensor or one that is sharded over a mesh, or nested lists, tuples and dicts with some.
        mesh: a Mesh, a mesh of processes or a slice of one, of the same sizes. If it has more axes, all ranks along
            them get the same rank-local tensor.
        stream: the stream of the results, for rank-local tensors; that of the tensor without one.

    Raises:
        ShapeError: the meshes have different sizes.
        MeshOpError: a step is being recorded: call it between recorded steps.
    """
    target = tensor_mesh_of(mesh)

    def moved(each: Any) -> Any:
        if isinstance(each, RankTensor | Tensor):
            return _moved(each, target, stream)
        if isinstance(each, torch.Tensor):
            raise ArgumentError("to_mesh: a plain tensor is on no mesh; use monarch.distribute(tensor, mesh, spec)")
        return each

    return tree_map(moved, tensors)


def _moved(tensor: Any, target: TensorMesh, stream: Any) -> Any:
    if stream is not None and not is_a(stream, Stream):
        raise ArgumentError(f"stream: expected a Stream, got {stream!r}")
    if current.observer is not None:
        raise MeshOpError("to_mesh cannot be part of a recorded step; call it between the steps of the two meshes")
    source: TensorMesh = tensor.monarch_layout.mesh
    if source.actors is None or target.actors is None:
        raise ArgumentError("to_mesh is not supported on a simulated mesh")
    if isinstance(tensor, RankTensor):
        check_input("to_mesh", tensor)
    route = _route(source, target)
    if route.missing and isinstance(tensor, Tensor):
        raise ShapeError(
            f"to_mesh: {target!r} has axes that {source!r} lacks; a sharded tensor moves only between meshes "
            f"with equal axis sizes"
        )
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast("Any", _Move).apply(tensor, target, stream)
    return _copied(tensor, target, stream)


def _route(source: TensorMesh, target: TensorMesh) -> _Route:
    known = _routes.setdefault(source, WeakKeyDictionary())
    found = known.get(target)
    if found is None:
        found = known[target] = _new_route(source, target)
    return found


def _new_route(source: TensorMesh, target: TensorMesh) -> _Route:
    own, other = source.region.extent, target.region.extent
    sizes = dict(zip(other.labels, other.sizes, strict=True))
    if own.sizes == other.sizes:
        missing: tuple[str, ...] = ()
        sources = dict(zip(target.ranks, source.ranks, strict=True))
    elif all(sizes.get(label) == size for label, size in zip(own.labels, own.sizes, strict=True)):
        missing = tuple(label for label in other.labels if label not in own.labels)
        sources = {}
        for rank in target.ranks:
            point = dict(zip(other.labels, target.coordinates(rank), strict=True))
            (sources[rank],) = source.region.slice(**{label: point[label] for label in own.labels}).base_ranks()
    else:
        raise ShapeError(f"to_mesh: the meshes have different sizes: {source!r} and {target!r}")
    takers: dict[int, int] = {}
    for rank in sources.values():
        takers[rank] = takers.get(rank, 0) + 1
    node = node_of(source.procs)
    whole = node.part(Movers).of(source.procs)
    movers = {rank: view_at(whole, _single(source, rank)) for rank in takers}
    if state_of(source.procs).procs.uid == state_of(target.procs).procs.uid:
        for rank, at in sources.items():
            if rank == at and takers[at] == 1:
                movers[at] = None
    source.recovery.link(target.recovery)
    return _Route(missing, takers, sources, movers)


def _single(mesh: TensorMesh, rank: int) -> Region:
    labels = mesh.region.extent.labels
    return mesh.region.slice(**dict(zip(labels, mesh.coordinates(rank), strict=False)))


def _template(mesh: TensorMesh, key: Any, make: Any) -> int:
    known = _templates.setdefault(mesh, {})
    found = known.get(key)
    if found is None:
        found = known[key] = mesh.stream.template(make())
    return found


def _copied(tensor: Any, target: TensorMesh, stream: Any) -> Any:
    """Return a copy of a tensor on another mesh, outside of autograd."""
    source: TensorMesh = tensor.monarch_layout.mesh
    route = _route(source, target)
    sharded: Any = None
    if isinstance(tensor, RankTensor):
        own = tensor.monarch_stream
        after = own if stream is None else stream if stream.number else None
        layout: Any = dense_layout(target, tensor.shape, tensor.dtype)
        shapes: Any = tuple(tensor.shape)
    else:
        own = after = None
        placements = tensor.placements
        layout = target.layouts.dense(tensor.shape, tensor.dtype, placements)
        shapes = {rank: shard_of(target, tensor.shape, placements, rank)[0] for rank in target.ranks}
        if len(set(shapes.values())) == 1:
            shapes = shapes[target.ranks[0]]
        sharded = tuple(placements), tuple(tensor.shape)
    ref = _MovedRef(target.stream, layout, source.stream)
    line = lines.here()
    first = own.number if own is not None else 0
    second = after.number if after is not None else 0
    pair = id(target)
    uid = state_of(target.procs).procs.uid
    send = _template(
        source, ("send", pair, first), lambda: Template("send", (), (Input(0), route.takers, first, uid), {})
    )
    args = state_of(source.procs).procs.uid, route.sources, route.movers, second
    receive = _template(target, ("to_mesh", id(source), second), lambda: Template("to_mesh", (), args, {}))
    source.stream.issue(send, (tensor.monarch_ref.number,), (ref.number,), (ref.number,), line)
    target.stream.issue(receive, (), (ref.number, shapes, tensor.dtype, sharded), (ref.number,), line)
    return RankTensor(ref, layout, after) if isinstance(tensor, RankTensor) else Tensor(ref, layout)
