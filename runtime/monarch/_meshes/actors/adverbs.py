"""Endpoints of a mesh on the caller's side: adverbs choose the receivers of a message and the form of the result.

The path of a message reads the insides of the mesh directly: a function of inside.py would cost a call for each.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from monarch._actors.endpoint import EXPLICIT, UNDECORATED, Arity, EndpointLike, methods_of
from monarch._actors.ports import Port
from monarch._actors.running import current
from monarch._core.shapes.extent import axes_text
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._meshes.actors.deferred_calls import call_later, must_wait, send_later, stream_later
from monarch._meshes.actors.each import map_items, values_for
from monarch._meshes.actors.relay import AnswerRelay
from monarch._meshes.actors.reply_stream import ReplyStream
from monarch._meshes.actors.results import single_value, value_mesh_of
from monarch._meshes.actors.sending import Outgoing, send_with_room
from monarch._meshes.actors.undecorated import Undecorated
from monarch._meshes.inside import called_of, member_at, node_of, region_of, state_of, targets_of, title_of
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node.future import Future
from monarch._node.peers.peer import cost_of
from monarch._node.peers.targets import Targets
from monarch._node.replies.gather import Gather
from monarch._node.services.registry import declared
from monarch._python.later import runs_event_loop
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_call
from monarch.exceptions import ArgumentError, SerializationError, StoppedError

P = ParamSpec("P")
R = TypeVar("R")


@declared("arguments.rref")
def _rref(actors: Any, name: str, flags: int, propagate: Any, args: Any, kwargs: Any) -> Any: ...


class _Answers(Protocol):
    """A sink for the answers to a call."""

    port: int


class Endpoint(Generic[P, R]):
    """One endpoint of the actors of a mesh. Each adverb checks the arguments, pickles them once and sends at once."""

    __slots__ = ("_arity", "_flags", "_propagate", "mesh", "name")

    def __init__(
        self, mesh: ActorMeshLike, name: str, arity: Arity | None, flags: int = 0, propagate: Any = None
    ) -> None:
        self.mesh = mesh
        self.name = name
        self._arity = arity
        self._flags = flags
        self._propagate = propagate
        """Of ``as_endpoint``, for ``rref``; None for that of the decorator."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Send to every actor of the mesh and return a future of a ValueMesh of the results.

        Raises:
            ArgumentError: the arguments do not fit the endpoint's signature.
            SerializationError: an argument cannot be pickled.
            StoppedError, SupervisionError: the mesh was stopped, or some of its ranks are dead.
            SendTimeoutError: a rank stayed too far behind, for 60 s unless ``MONARCH_ROOM_TIMEOUT`` says otherwise; the
                call was sent to no rank.
        """
        return self._gather(args, kwargs, value_mesh_of)

    def call_each(self, values: Sequence[Any] | ValueMesh[Any], *args: Any, **kwargs: Any) -> Future[ValueMesh[R]]:
        """Send to every actor of the mesh, each with its own first argument.

        Args:
            values: one for each actor, in the order of the mesh.
            args: positional arguments after it, the same for all.
            kwargs: keyword arguments, the same for all.

        Raises:
            ArgumentError: there are more or fewer values than actors, or they do not fit the endpoint's signature.
            SerializationError, StoppedError, SupervisionError, SendTimeoutError: see ``call``.
        """
        each = values_for(self.mesh, values, f"{called_of(self.mesh)}.{self.name}.call_each")
        if must_wait(self.mesh):
            packed = [self._pack((value, *args), kwargs) for value in each]
            return call_later(self.mesh, self.name, lambda: self._call_each(packed))
        return self._call_each([self._pack((value, *args), kwargs, True) for value in each])

    def _call_each(self, prepared: list[tuple[bytes, list[memoryview]]]) -> Future[ValueMesh[R]]:
        mesh, node, state = self.mesh, node_of(self.mesh), state_of(self.mesh)
        targets = targets_of(mesh)
        gather: Gather[Any] = Gather(
            node, targets.peers, targets.extent, state.name, self.name, value_mesh_of, state.key, opens=False
        )
        gather.view = mesh
        each = [
            # With the view of the whole mesh, in which the answer names its position.
            (message, Targets(node.hosts, [peer], targets.shape, targets.version))
            for peer, message in zip(targets.peers, prepared, strict=True)
        ]
        self._dispatch(each, gather, False)
        if node.peers.deaths:
            # Of a process that died after the check of who lives, the open calls were told before there was this one.
            gather.check()
        return gather

    def map(self, items: Iterable[Any]) -> Iterator[R]:
        """Yield the result for each item, in their order; each actor takes the next item when it is free.

        Calls are made as results are taken, two ahead for each actor; behind a slow item, 16 results for each actor
        wait at most. An item that fails raises when its result is taken, and ends the iterator: then, and after
        ``close()``, items that have not begun are not handled, those that have begun continue, and no further items are
        taken. To continue after a failed item, return the error as a value.

        Args:
            items: arguments, one for each call.

        Raises:
            ArgumentError, SerializationError, StoppedError, SupervisionError, SendTimeoutError: see ``call``; from the
                iterator.
        """
        return map_items(self.mesh, self.name, items)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Send to the only actor of this mesh and return a future of its result.

        Raises:
            ArgumentError: the mesh does not have exactly one actor, or the arguments do not fit.
            SerializationError, StoppedError, SupervisionError, SendTimeoutError: see ``call``.
        """
        mesh = self.mesh
        if mesh._shape.region.nelements != 1:  # pyright: ignore[reportPrivateUsage]
            raise ArgumentError(
                f"call_one: expected a mesh of exactly 1 actor, got {called_of(mesh)} with {axes_text(mesh.extent)}; "
                f"slice it, or use call or choose"
            )
        return self._gather(args, kwargs, single_value)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Send to a random actor of the mesh and return a future of its result.

        Raises:
            ArgumentError, SerializationError, StoppedError, SupervisionError, SendTimeoutError: see ``call``.
        """
        one = member_at(self.mesh, random.randrange(len(self.mesh)))
        return Endpoint[P, R](one, self.name, self._arity, self._flags)._gather(args, kwargs, single_value)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Send to every actor of the mesh and yield a future for each answer, in order of arrival.

        Raises:
            ArgumentError, SerializationError, StoppedError, SupervisionError, SendTimeoutError: see ``call``.
        """
        if must_wait(self.mesh):
            packed = self._pack(args, kwargs)
            return iter(stream_later(self.mesh, self.name, lambda: self._stream(packed)))
        return iter(self._stream(self._pack(args, kwargs, True)))

    def _stream(self, prepared: tuple[bytes, list[memoryview]]) -> list[Future[R]]:
        mesh = self.mesh
        node = mesh._node  # pyright: ignore[reportPrivateUsage]
        targets = mesh._members_at()  # pyright: ignore[reportPrivateUsage]
        stream = ReplyStream(node, mesh, targets, self.name)
        self._dispatch([(prepared, targets)], stream, False)
        if node.peers.deaths:
            # Of a process that died after the check of who lives, the open calls were told before there was this one.
            stream.check()
        return list(stream.futures)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every actor of the mesh without waiting for answers.

        If an endpoint raises, its actor fails and the owner of the actor is told.

        Raises:
            ArgumentError, SerializationError, StoppedError, SupervisionError, SendTimeoutError: see ``call``.
        """
        self._send(args, kwargs)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the endpoint on all ranks of an active mesh, in order with the ops on their tensors.

        Args:
            args: a rank-local tensor arrives as the tensor of the rank.
            kwargs: likewise.

        Returns:
            The tensors that the endpoint returns, as rank-local ones. Shapes come from ``propagate`` of the endpoint,
            or from the first call with arguments of the same types, which waits.

        Raises:
            ArgumentError: no mesh is active, and no argument tells it.
            MeshOpError: a tensor is the program's, or on another mesh.
            ActorError: the endpoint raised while its results were learnt.
        """
        propagate = self._propagate
        if propagate is None:
            propagate = getattr(inspect.getattr_static(state_of(self.mesh).cls, self.name, None), "propagate", None)
        return _rref(self.mesh, self.name, self._flags, propagate, args, kwargs)

    def send_to(self, args: tuple[Any, ...], kwargs: dict[str, Any], port: Port[Any] | None, choose: bool) -> None:
        """Send with a port for the answers that the caller chooses."""
        mesh = member_at(self.mesh, random.randrange(len(self.mesh))) if choose else self.mesh
        if port is None:
            Endpoint[P, R](mesh, self.name, self._arity, self._flags)._send(args, kwargs)
            return
        endpoint = Endpoint[P, R](mesh, self.name, self._arity, self._flags)
        if must_wait(mesh):
            packed = endpoint._pack(args, kwargs)
            send_later(mesh, self.name, lambda: endpoint._relay(packed, port), lambda _: None, port.exception)
        else:
            endpoint._relay(endpoint._pack(args, kwargs, True), port)

    def _relay(self, prepared: tuple[bytes, list[memoryview]], port: Port[Any]) -> None:
        mesh = self.mesh
        method = methods_of(state_of(mesh).cls).get(self.name)
        explicit = bool(self._flags & EXPLICIT) or (method is not None and method.explicit)
        node, targets = node_of(mesh), targets_of(mesh)
        relay = AnswerRelay(node, mesh, targets, self.name, port, explicit)
        self._dispatch([(prepared, targets)], relay, not explicit)
        relay.check()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ArgumentError: an endpoint of a mesh is called by ``call``, ``choose`` and the like."""
        name = f"{state_of(self.mesh).name}.{self.name}"
        raise ArgumentError(f"{name} is an endpoint of a mesh: choose how to call it, as in {name}.call(...)")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            ways = [each for each in dir(type(self)) if not each.startswith("_")]
            from difflib import get_close_matches

            near = get_close_matches(name, ways, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(ways)}"
            raise AttributeError(f"{self!r} has no attribute {name!r}; {hint}")

    def __repr__(self) -> str:
        return f"<endpoint {self.name} of {called_of(self.mesh)}>"

    def _gather(self, args: tuple[Any, ...], kwargs: dict[str, Any], finish: Any) -> Future[Any]:
        if runs_event_loop() and must_wait(self.mesh):
            packed = self._pack(args, kwargs)
            return call_later(self.mesh, self.name, lambda: self._call(packed, finish))
        return self._call(self._pack(args, kwargs, True), finish)

    def _call(self, prepared: tuple[bytes, list[memoryview]], finish: Any) -> Future[Any]:
        mesh = self.mesh
        node, state = mesh._node, mesh._state  # pyright: ignore[reportPrivateUsage]
        targets = mesh._members_at()  # pyright: ignore[reportPrivateUsage]
        gather: Gather[Any] = Gather(
            node, targets.peers, targets.extent, state.name, self.name, finish, state.key, opens=False
        )
        gather.view = mesh
        self._dispatch([(prepared, targets)], gather, True)
        if node.peers.deaths:
            # Of a process that died after the check of who lives, the open calls were told before there was this one.
            gather.check()
        return gather

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def send(prepared: tuple[bytes, list[memoryview]]) -> None:
            targets = self.mesh._members_at()  # pyright: ignore[reportPrivateUsage]
            self._dispatch([(prepared, targets)], None, True)

        if must_wait(self.mesh):
            packed = self._pack(args, kwargs)
            send_later(self.mesh, self.name, lambda: send(packed), lambda _: None, self._not_sent)
        else:
            send(self._pack(args, kwargs, True))

    def _not_sent(self, error: BaseException) -> None:
        """Report that a deferred broadcast was not sent."""
        mesh, ranks = self.mesh, tuple(region_of(self.mesh).base_ranks())
        text = f"a broadcast of {self.name}() was not sent: {error}"
        node_of(mesh).events.not_sent.tell(mesh, ranks, text)

    def _pack(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wait: bool = False
    ) -> tuple[bytes, list[memoryview]]:
        """Pickle the arguments after a check that the receivers live, which may ``wait`` for a verdict."""
        if self._arity is not None:
            self._arity.check(args, kwargs)
        mesh = self.mesh
        state = mesh._state  # pyright: ignore[reportPrivateUsage]
        if state.stopped is not None:
            raise StoppedError(
                f"{title_of(mesh, self.name)} was not sent: {state.name} was stopped ({state.stopped}); "
                f"spawn a new one",
                mesh=state.name,
            )
        node = mesh._node  # pyright: ignore[reportPrivateUsage]
        if wait and (node.peers.deaths or state.failed or node.ended):
            mesh._check_alive(self.name)  # pyright: ignore[reportPrivateUsage]
        try:
            return dumps_call(args, kwargs, mesh._receivers)  # pyright: ignore[reportPrivateUsage]
        except SerializationError as error:
            raise SerializationError(f"{title_of(mesh, self.name)} was not sent: {error}") from error.__cause__

    def _dispatch(
        self, each: Sequence[tuple[tuple[bytes, list[memoryview]], Targets]], sink: _Answers | None, gathered: bool
    ) -> None:
        """Send messages to all of their targets; if this raises, close the port of the sink.

        Args:
            each: body and buffers of a message, and its receivers.
            sink: takes the answers; None if there are none.
            gathered: whether answers of a host may be folded into one.
        """
        mesh = self.mesh
        node, state = mesh._node, mesh._state  # pyright: ignore[reportPrivateUsage]
        port = 0
        here = current.get()
        sender = here[0].key if here is not None else ""
        messages: list[Outgoing] = []
        try:
            if sink is not None:
                port = sink.port or node.ports.open_call(sink)
            if node.bulk.deferred or node.bulk.releases:
                # Memory released since the last call is free for the answers of this one.
                node.bulk.settle()
            for (body, buffers), targets in each:
                # Not through cost_of() for a small message.
                cost = cost_of(body, buffers) if buffers else 1 + (len(body) >> 12)
                shape = targets.shape.packed
                call = m.Call(node.proc, state.key, self.name, port, shape, sender, self._flags, body, None, 0, cost)
                messages.append(Outgoing(node, targets, call, buffers, gathered))
            send_with_room(node, messages, mesh, self.name, sink)
        except BaseException:
            for message in messages:
                message.drop()
            if sink is not None and not (len(messages) == len(each) and all(message.is_sent for message in messages)):
                # Nobody waits for the answers. After an interrupt while the messages went out, the call continues, as
                # one whose future was dropped.
                node.ports.close(sink.port)
            raise


@overload
def as_endpoint(
    method: Callable[P, Awaitable[R]], *, propagate: Any = None, explicit_response_port: Literal[False] = False
) -> EndpointLike[P, R]: ...


@overload
def as_endpoint(
    method: Callable[P, R], *, propagate: Any = None, explicit_response_port: Literal[False] = False
) -> EndpointLike[P, R]: ...


@overload
def as_endpoint(
    method: Callable[Concatenate[Port[R], P], object], *, propagate: Any = None, explicit_response_port: Literal[True]
) -> EndpointLike[P, R]: ...


@overload
def as_endpoint(
    method: EndpointLike[P, R], *, propagate: Any = None, explicit_response_port: bool = False
) -> EndpointLike[P, R]: ...


def as_endpoint(method: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Any:
    """Return the endpoint of a method that has no decorator: ``as_endpoint(mesh.method).call(...)``.

    Args:
        method: the method; an endpoint too, to change how it is called.
        propagate: how ``rref`` learns the shapes of its results; see ``monarch.remote``.
        explicit_response_port: the method gets a port for its answer as its first argument.

    Raises:
        ValueError: ``method`` is not a method of a spawned actor.
    """
    if isinstance(method, Endpoint):
        endpoint = cast("Endpoint[..., Any]", method)
        flags = UNDECORATED | (EXPLICIT if explicit_response_port else 0)
        made: Endpoint[..., Any] = Endpoint(endpoint.mesh, endpoint.name, None, flags, propagate)
        return made
    if isinstance(method, Undecorated):
        flags = UNDECORATED | (EXPLICIT if explicit_response_port else 0)
        arity = Arity(method.name, method.function, 2 if explicit_response_port else 1)
        made: Endpoint[..., Any] = Endpoint(method.mesh, method.name, arity, flags, propagate)
        return made
    raise ValueError(f"as_endpoint: expected a method of a spawned actor, as in mesh.method, got {method!r}")


def send(
    endpoint: EndpointLike[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    port: Port[Any] | None = None,
    selection: str = "all",
) -> None:
    """Send a message whose answers go to a port.

    Args:
        endpoint: the endpoint to call.
        args: positional arguments.
        kwargs: keyword arguments.
        port: receives the answers; None to discard them.
        selection: ``all`` for every actor of the mesh, ``choose`` for one at random.

    Raises:
        ValueError: ``selection`` is neither.
    """
    if selection not in ("all", "choose"):
        raise ValueError(f"selection: expected 'all' or 'choose', got {selection!r}")
    cast("Endpoint[..., Any]", endpoint).send_to(args, kwargs or {}, port, selection == "choose")
