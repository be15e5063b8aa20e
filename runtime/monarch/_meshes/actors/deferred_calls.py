"""Calls from an event loop to a mesh with an open verdict: a thread sends them, in order, once it is settled."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._meshes.inside import called_of, check_alive, node_of, state_of
from monarch._node.future import Future, judging, when_done
from monarch._python.later import runs_event_loop
from monarch.exceptions import StoppedError

if TYPE_CHECKING:
    from monarch._meshes.mesh_like import ActorMeshLike

R = TypeVar("R")
S = TypeVar("S")


_at_once: ContextVar[bool] = ContextVar("monarch_at_once", default=False)


@contextmanager
def at_once() -> Generator[None]:
    """Send calls before they return, as a cell does: its event loop does not run meanwhile."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


class Later(Future[R]):
    """The future of a call that is not sent yet, or could not be sent."""

    __slots__ = ("_source", "_why")

    def __init__(self, mesh: ActorMeshLike, label: str) -> None:
        super().__init__(node_of(mesh), label)
        # Both are set once, before it is done.
        self._source: Future[R] | None = None
        self._why: BaseException | None = None

    def sent(self, source: Future[R]) -> None:
        """Note that the call was sent."""
        self._source = source
        when_done(source, lambda _: self._complete())

    def fail(self, error: BaseException) -> None:
        """Note that the call could not be sent."""
        self._why = error
        self._complete()

    def _make(self) -> R:
        if self._why is not None:
            raise self._why
        assert self._source is not None
        return self._source.get()


def must_wait(mesh: ActorMeshLike) -> bool:
    """Return whether a call from this thread would block its event loop on a verdict, or overtake one that waits."""
    if not runs_event_loop() or judging.get() or _at_once.get():
        return False
    # Not through inside.py, since each call from an event loop passes here.
    node = mesh._node  # pyright: ignore[reportPrivateUsage]
    return not node.lanes.is_idle(_lane(mesh)) or mesh._awaits_verdict()  # pyright: ignore[reportPrivateUsage]


def send_later(
    mesh: ActorMeshLike,
    method: str,
    send: Callable[[], S],
    sent: Callable[[S], object],
    failed: Callable[[Any], object],
) -> None:
    """Send a message when the verdict on a mesh is settled, after those that wait already.

    Args:
        mesh: the receivers.
        method: the endpoint.
        send: sends it on behalf of the actor that runs here.
        sent: called with the result of ``send``.
        failed: called with the error of ``send``, or of the check before it.
    """
    here = copy_context()

    def act() -> None:
        try:
            # Outside the actor's context, since the actor continues meanwhile.
            check_alive(mesh, method)
            result = here.run(send)
        except BaseException as error:
            failed(error)
        else:
            sent(result)

    node_of(mesh).lanes.post(_lane(mesh), act)


def call_later(mesh: ActorMeshLike, method: str, send: Callable[[], Future[R]]) -> Later[R]:
    """Return a future of the call that ``send`` makes later."""
    later: Later[R] = Later(mesh, f"{called_of(mesh)}.{method}()")
    send_later(mesh, method, send, later.sent, later.fail)
    return later


def stream_later(mesh: ActorMeshLike, method: str, send: Callable[[], Iterable[Future[R]]]) -> list[Later[R]]:
    """Return futures of the stream that ``send`` opens later."""
    laters: list[Later[R]] = [Later(mesh, f"{called_of(mesh)}.{method}()") for _ in range(len(mesh))]
    send_later(mesh, method, send, partial(_streamed, mesh, laters), partial(_fail_all, laters))
    return laters


def _streamed(mesh: ActorMeshLike, laters: list[Later[R]], futures: Iterable[Future[R]]) -> None:
    sources = list(futures)
    for later, source in zip(laters, sources, strict=False):
        later.sent(source)
    _fail_all(laters[len(sources) :], StoppedError(f"{state_of(mesh).name} has shrunk", mesh=state_of(mesh).name))


def _fail_all(laters: Iterable[Later[Any]], error: BaseException) -> None:
    for later in laters:
        later.fail(error)


def _lane(mesh: ActorMeshLike) -> str:
    return f"later-{mesh._state.key}"  # pyright: ignore[reportPrivateUsage]
