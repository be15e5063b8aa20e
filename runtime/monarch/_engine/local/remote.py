"""``remote``: functions that run on the ranks with their tensors, and make new ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monarch._core.shapes.value_mesh import ValueMesh
from monarch._engine.dtensor_compat import tree_flatten, tree_map, tree_unflatten, without_modes
from monarch._engine.issuing.encoding import Input, Template
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.shard_refs import ShardRef
from monarch._engine.issuing.stream import Ref, new_number
from monarch._engine.layouts.rank_layout import layout_of
from monarch._engine.local.checking import check_input, local_tensor, mesh_differs, mixed, stream_differs
from monarch._engine.local.current import active_mesh
from monarch._engine.local.looking import place_in
from monarch._engine.local.metadata import fake, fake_mode
from monarch._engine.local.streams import streams
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.executing import Execution
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._meshes.inside import view_at
from monarch._node.future import Future, then
from monarch._wire.pickling import dumps_whole
from monarch.exceptions import ArgumentError, MeshOpError, ShapeError

_MODES = ("cached", "inspect", "mocked")


_Make = Callable[[list[Any]], Any]


class Remote:
    """A function that runs on all ranks of a mesh. Made by ``monarch.remote``.

    Calling it returns rank-local tensors at once. ``call`` and the like return futures of other values.

    Raises:
        ArgumentError: neither a function nor the name of one, or an unknown way to infer results.
    """

    def __init__(self, function: Callable[..., Any] | str, propagate: Any) -> None:
        # Callers without a type checker pass anything.
        if not callable(function) and (not isinstance(function, str) or "." not in function):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"remote: expected a function, or a name such as 'package.module.name', got {function!r}"
            )
        if propagate is not None and not callable(propagate) and propagate not in _MODES:
            raise ArgumentError(
                f"propagate: expected a function, {', '.join(map(repr, _MODES))} or None, got {propagate!r}"
            )
        self.mesh: TensorMesh | None = None
        """Of the last call."""
        self.function = function
        self._propagate = propagate
        self._templates: WeakKeyDictionary[TensorMesh, int] = WeakKeyDictionary()
        """Of the function on each mesh; single operations, from any thread."""
        self._known: dict[Any, Any] = {}
        """Structure and metadata of results by those of arguments; likewise."""

    def with_propagate(self, propagate: Any) -> Remote:
        """Return the same function with another way to infer its results."""
        if propagate is self._propagate or (isinstance(propagate, str) and propagate == self._propagate):
            return self
        made = Remote(self.function, propagate)
        made._templates, made._known = self._templates, self._known
        return made

    def __repr__(self) -> str:
        return f"<remote {getattr(self.function, '__qualname__', self.function)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the ranks; return its results as rank-local tensors.

        Args:
            args: rank-local tensors arrive as the tensor of the rank; others are the same for all ranks.
            kwargs: likewise.

        Raises:
            ArgumentError: no mesh is active, and no argument tells it.
            MeshOpError: a tensor is the program's, on another mesh, or recorded by autograd.
            ActorError: the function raised while its results were learnt; later, looks at results raise TensorError.
        """
        return self.rref(*args, **kwargs)

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the ranks; return its results as rank-local tensors.

        Raises:
            ArgumentError, MeshOpError, ActorError: as a call of the object.
        """
        leaves, tree = tree_flatten((args, kwargs))
        tensors, mesh, stream = self._checked(leaves)
        self.mesh = mesh
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            raise MeshOpError(f"{self!r} has no gradient; use torch.no_grad() or tensor.detach()")
        places = iter(range(len(tensors)))
        packed_leaves = [Input(next(places)) if isinstance(each, RankTensor) else each for each in leaves]
        with without_modes():
            packed = dumps_whole(tree_unflatten(packed_leaves, tree), repr(self))
        known = self._results(mesh, args, kwargs, leaves, tree)
        template = self._template(mesh)
        inputs = tuple([each.monarch_ref.number for each in tensors])
        if known is None:
            token = new_number()
            mesh.stream.issue(template, inputs, (packed, None), (token,), lines.here())
            try:
                known = self._learnt(mesh, token)
                if self._propagate != "inspect":
                    self._known[self._key(mesh, leaves, tree)] = known
                results, made = _made(mesh, known, stream)
                unpack = mesh.stream.template(Template("unpack", (), (Input(0),), {}))
                mesh.stream.issue(unpack, (token,), (), tuple(each.monarch_ref.number for each in made), lines.here())
            finally:
                mesh.stream.pending.append(token)
            return results
        results, made = _made(mesh, known, stream)
        numbers = tuple(each.monarch_ref.number for each in made)
        mesh.stream.issue(
            template, inputs, (packed, [each for each in known[1] if each is not None]), numbers, lines.here()
        )
        return results

    def _checked(self, leaves: list[Any]) -> tuple[list[RankTensor], TensorMesh, Any]:
        """Return the tensors among arguments, and the mesh and stream of the call."""
        tensors = [each for each in leaves if isinstance(each, RankTensor)]
        for each in leaves:
            if isinstance(each, Tensor):
                raise mixed(self)
            if isinstance(each, torch.Tensor) and not isinstance(each, RankTensor) and each.requires_grad:
                raise local_tensor(self, each)
        for each in tensors:
            check_input(self, each)
            if each.monarch_layout.mesh is not tensors[0].monarch_layout.mesh:
                raise mesh_differs(self, tensors)
            if each.monarch_stream is not tensors[0].monarch_stream:
                raise stream_differs(self, tensors)
        if tensors:
            return tensors, tensors[0].monarch_layout.mesh, tensors[0].monarch_stream
        mesh = active_mesh()
        if mesh is None:
            raise ArgumentError(f"{self!r}: no device mesh is active; use 'with mesh.activate():'")
        return [], mesh, streams.active

    def _template(self, mesh: TensorMesh) -> int:
        number = self._templates.get(mesh)
        if number is None:
            function = self.function
            with without_modes():
                packed = function if isinstance(function, str) else dumps_whole(function, repr(self))
            number = self._templates[mesh] = mesh.stream.template(Template("call", (), (packed,), {}))
        return number

    def _key(self, mesh: TensorMesh, leaves: list[Any], tree: Any) -> Any:
        parts = [each.monarch_layout if isinstance(each, RankTensor) else _plain(each) for each in leaves]
        return mesh, tree, tuple(parts)

    def _results(self, mesh: TensorMesh, args: Any, kwargs: Any, leaves: list[Any], tree: Any) -> Any:
        """Return structure and metadata of the results; None if they must be learnt from the ranks."""
        how = self._propagate
        if how == "inspect":
            return None
        if how is None or how == "cached":
            return self._known.get(self._key(mesh, leaves, tree))
        if isinstance(self.function, str) and how == "mocked":
            raise ArgumentError(f"{self!r}: propagate='mocked' needs a function, not a name")
        function: Any = self.function if how == "mocked" else how
        with without_modes(), fake_mode():
            given, named = tree_map(_fake, (args, kwargs))
            found, result_tree = tree_flatten(function(*given, **named))
        metas: list[Any] = []
        for each in found:
            if each is not None and not isinstance(each, torch.Tensor):
                raise ArgumentError(f"{self!r}: propagate= must return tensors, got {type(each).__name__}")
            metas.append((tuple(each.shape), tuple(each.stride()), each.dtype) if each is not None else None)
        return result_tree, metas

    def _learnt(self, mesh: TensorMesh, token: int) -> Any:
        with without_modes():
            found: list[Any] = mesh.recovery.look(token, "results", mesh.actors)
        if any(each != found[0] for each in found):
            raise ShapeError(f"{self!r}: the ranks returned tensors of different shapes: {[each[1] for each in found]}")
        return tree_flatten(found[0][0])[1], found[0][1]

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Run the function on all ranks; return a future of what they return."""
        mesh, view, packed = self._for_values(args, kwargs)
        extent, region = mesh.region.extent, mesh.region
        return self._asked(mesh, view, packed, lambda found: ValueMesh.of(extent, found, region.base_ranks))

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on the only rank of the mesh; return a future of what it returns.

        Raises:
            ArgumentError: the mesh does not have exactly one rank.
        """
        mesh, view, packed = self._for_values(args, kwargs)
        if len(mesh.ranks) != 1:
            raise ArgumentError(f"{self!r}: call_one requires exactly 1 rank, but the mesh has {len(mesh.ranks)}")
        return self._asked(mesh, view, packed, lambda found: found[0])

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on a random rank; return a future of what it returns."""
        mesh, _, packed = self._for_values(args, kwargs)
        return self._on_one(mesh, random.choice(mesh.ranks), packed)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
        """Run the function on all ranks; return a future for each, in the order of ranks."""
        mesh, _, packed = self._for_values(args, kwargs)
        return iter([self._on_one(mesh, rank, packed) for rank in mesh.ranks])

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Run the function on all ranks, without waiting; the end of a cell reports errors."""
        mesh, view, packed = self._for_values(args, kwargs)
        mesh.stream.follow(self._sent(mesh, view, packed))

    def on_shard(self, args: Any, kwargs: Any, shard: dict[str, int] | None) -> Future[Any]:
        """Run the function on one rank; return a future of what it returns."""
        mesh, _, packed = self._for_values(args, kwargs)
        view = view_at(mesh.actors, place_in(mesh, shard, {}))
        return self._asked(mesh, view, packed, lambda found: found[0])

    def _for_values(self, args: Any, kwargs: Any) -> tuple[TensorMesh, Any, Any]:
        leaves, tree = tree_flatten((args, kwargs))
        _, mesh, _ = self._checked(leaves)
        packed = [ShardRef(each.monarch_ref.number) if isinstance(each, RankTensor) else each for each in leaves]
        return mesh, mesh.actors, tree_unflatten(packed, tree)

    def _on_one(self, mesh: TensorMesh, rank: int, packed: Any) -> Future[Any]:
        point = dict(zip(mesh.region.extent.labels, mesh.coordinates(rank), strict=False))
        return self._asked(mesh, view_at(mesh.actors, mesh.region.slice(**point)), packed, lambda found: found[0])

    def _sent(self, mesh: TensorMesh, view: Any, packed: Any) -> Execution:
        with without_modes():
            mesh.recovery.before_look()
            sent = Execution(mesh.stream, view, self.function, *packed)
        sent.future.rename(repr(self))
        return sent

    def _asked(self, mesh: TensorMesh, view: Any, packed: Any, make: _Make) -> Future[Any]:
        sent = self._sent(mesh, view, packed)

        def settle() -> Any:
            with without_modes():
                return make([each.value for each in mesh.recovery.answers(sent).values()])

        return then(sent.future, repr(self), settle)


def _fake(value: Any) -> Any:
    return fake(value.monarch_layout) if isinstance(value, RankTensor) else value


def _plain(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def _made(mesh: TensorMesh, known: Any, stream: Any) -> tuple[Any, list[RankTensor]]:
    tree, metas = known
    made: list[RankTensor] = []
    leaves: list[Any] = []
    for each in metas:
        if each is None:
            leaves.append(None)
            continue
        layout = layout_of(mesh, *each)
        made.append(RankTensor(Ref(mesh.stream, layout), layout, stream))
        leaves.append(made[-1])
    return tree_unflatten(leaves, tree), made


def remote(function: Any = None, *, propagate: Any = None) -> Any:
    """Return a function that runs on the ranks, with their tensors.

    Args:
        function: a function, or its name as ``"package.module.name"``; without it, a decorator is returned.
        propagate: how the program learns shapes and dtypes of the results: a function that is called with fake
            tensors; ``"cached"`` or None: from the first call with arguments of the same types, which waits;
            ``"inspect"``: from each call; ``"mocked"``: from the function itself, called with fake tensors.

    Raises:
        ArgumentError: it is not a function, or ``propagate`` is something else.
    """
    if function is None:
        return functools.partial(Remote, propagate=propagate)
    return Remote(function, propagate)


def call_on_shard_and_fetch(
    function: Remote, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
) -> Future[Any]:
    """Run a remote function on one rank; return a future of what it returns.

    Args:
        function: made by ``remote``.
        args: rank-local tensors arrive as the tensor of the rank.
        shard: coordinates of the rank by axis; the first rank without any.
        kwargs: likewise.
    """
    return function.on_shard(args, kwargs, shard)
