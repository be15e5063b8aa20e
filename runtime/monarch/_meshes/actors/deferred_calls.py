"""Calls from an event loop to a mesh with an open verdict: a thread sends them, in order, once that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._core.later import runs_event_loop
from monarch._node.future import Future, judging
from monarch.exceptions import StoppedError

if TYPE_CHECKING:
    from monarch._meshes.mesh_like import ActorMeshLike

R = TypeVar("R")
S = TypeVar("S")


_at_once: ContextVar[bool] = ContextVar("monarch_at_once", default=False)


@contextmanager
def at_once() -> Iterator[None]:
    """Have calls be sent before they return, as a cell does: the event loop of its thread does not run meanwhile."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


class Later(Future[R]):
    """The outcome of a call that was not sent yet, or that could not be sent."""

    __slots__ = ("_source", "_why")

    def __init__(self, mesh: ActorMeshLike, label: str) -> None:
        super().__init__(mesh._node, label)
        # Both are set once, before it is done.
        self._source: Future[R] | None = None
        self._why: BaseException | None = None

    def sent(self, source: Future[R]) -> None:
        """The call is under way."""
        self._source = source
        source._when_done(lambda _: self._complete())  # pyright: ignore[reportPrivateUsage]

    def fail(self, error: BaseException) -> None:
        """The call was not sent."""
        self._why = error
        self._complete()

    def _make(self) -> R:
        if self._why is not None:
            raise self._why
        assert self._source is not None
        return self._source.get()


def must_wait(mesh: ActorMeshLike) -> bool:
    """Return whether a call from this thread would keep an event loop waiting for a verdict, or overtake one that does."""
    if not runs_event_loop() or judging.get() or _at_once.get():
        return False
    return not mesh._node.lanes.is_idle(_lane(mesh)) or mesh._awaits_verdict()


def send_later(
    mesh: ActorMeshLike,
    method: str,
    send: Callable[[], S],
    sent: Callable[[S], object],
    failed: Callable[[Any], object],
) -> None:
    """Send a message when the verdict on a mesh has ended, after those that wait already.

    Args:
        mesh: the receivers.
        method: the endpoint.
        send: does it, on behalf of the actor that runs here.
        sent: told of what that returns.
        failed: told of the error that it raises, or that says why it was not sent.
    """
    here = copy_context()

    def act() -> None:
        try:
            # Not on behalf of the actor, which goes on meanwhile.
            mesh._check_alive(method)
            result = here.run(send)
        except BaseException as error:
            failed(error)
        else:
            sent(result)

    mesh._node.lanes.post(_lane(mesh), act)


def call_later(mesh: ActorMeshLike, method: str, send: Callable[[], Future[R]]) -> Later[R]:
    """Return the future of one call that ``send`` makes."""
    later: Later[R] = Later(mesh, f"{mesh._called}.{method}()")
    send_later(mesh, method, send, later.sent, later.fail)
    return later


def stream_later(mesh: ActorMeshLike, method: str, send: Callable[[], Iterable[Future[R]]]) -> list[Later[R]]:
    """Return the futures of a stream that ``send`` makes."""
    laters: list[Later[R]] = [Later(mesh, f"{mesh._called}.{method}()") for _ in range(len(mesh))]
    send_later(mesh, method, send, partial(_streamed, mesh, laters), partial(_fail_all, laters))
    return laters


def _streamed(mesh: ActorMeshLike, laters: list[Later[R]], futures: Iterable[Future[R]]) -> None:
    sources = list(futures)
    for later, source in zip(laters, sources, strict=False):
        later.sent(source)
    _fail_all(laters[len(sources) :], StoppedError(f"{mesh._name} has become smaller", mesh=mesh._name))


def _fail_all(laters: Iterable[Later[Any]], error: BaseException) -> None:
    for later in laters:
        later.fail(error)


def _lane(mesh: ActorMeshLike) -> str:
    return f"later-{mesh._key}"
