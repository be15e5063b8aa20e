"""The running actor, and protocols of an actor for the other files of this room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from monarch._node.node import Node
from monarch._node.rank_config import ActorSpec

if TYPE_CHECKING:
    import asyncio

    from monarch._node.future import Future
    from monarch._wire.messages import Call


class ExecutorLike(Protocol):
    """The thread or loop of an actor; see executors.py."""

    begun: int
    package_tasks: set[asyncio.Task[Any]]

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...
    @property
    def interruptible(self) -> bool: ...
    def post(self, action: Callable[[], None], /) -> None: ...
    def enter_loop(self, first: Callable[[], None], /) -> None: ...
    def user_code(self) -> AbstractContextManager[None]: ...
    def release(self, released: Callable[[], None], /) -> None: ...
    def running_task(self) -> asyncio.Task[Any] | None: ...
    def interrupt(self, task: asyncio.Task[Any] | None, /) -> bool: ...


class TurnsLike(Protocol):
    """The messages of an actor on its event loop; see turns.py."""

    @property
    def call(self) -> Call | None: ...
    @property
    def task(self) -> asyncio.Task[Any] | None: ...
    @property
    def tasks(self) -> Mapping[asyncio.Task[Any], Call]: ...
    @property
    def ended(self) -> int: ...
    async def drain(self, seconds: float, /) -> None: ...
    async def cancel_all(self, seconds: float, /) -> list[Call]: ...


class AwaitsLike(Protocol):
    """The awaits of an endpoint; see awaits.py."""

    def add(self, arrival: asyncio.Future[Any], future: Future[Any], /) -> None: ...
    def end(self) -> None: ...


class HaltingLike(Protocol):
    """The end of an actor; see halting.py."""

    @property
    def given_up(self) -> bool: ...


class ActorLike(Protocol):
    """An actor in its process; see mailbox.py."""

    node: Node
    key: str
    spec: ActorSpec | None
    rank: int
    instance: Any
    running: Call | None
    since: float
    queue: deque[Call]
    owned: list[Any]
    at_end: dict[str, Callable[[], object]]
    blocked: bool

    @property
    def executor(self) -> ExecutorLike: ...
    @property
    def turns(self) -> TurnsLike: ...
    @property
    def halting(self) -> HaltingLike | None: ...
    @property
    def awaits(self) -> AwaitsLike | None: ...
    @awaits.setter
    def awaits(self, awaits: Any, /) -> None: ...
    def title(self) -> str: ...
    def take_class(self, cls: type, /) -> None: ...
    def state_of(self, proc: str, port: int, /) -> str | None: ...
    def is_refused(self, call: Call, /) -> bool: ...
    def is_concurrent(self, call: Call, /) -> bool: ...
    def cancelled(self, call: Call, why: str, /) -> None: ...
    def refuse_rest(self, reason: str, /) -> None: ...
    def abandon(self, calls: Iterable[Call], /) -> None: ...
    def leave(self, reason: str, /) -> None: ...
    def fail(self, failure: bytes, /) -> None: ...
    def halt(self, reason: str, stopped: Callable[[bytes | None], None], process: bool = False, /) -> None: ...
    def end_cause(self) -> Exception | None: ...
    def let_go(self) -> None: ...
    async def run_async(self, call: Call, more: Sequence[Any], /) -> None: ...


current: ContextVar[tuple[ActorLike, Call] | None] = ContextVar("monarch_call", default=None)
"""The actor whose code runs here, and the message that it handles."""


def _as_it_is(_: BaseException) -> BaseException | None:
    return None


on_error: Callable[[BaseException], BaseException | None] = _as_it_is
"""Called with each error of an endpoint; may return a replacement. Set when a session begins."""
before: list[Callable[[], None]] = []
"""Called before the code of a call begins, in its thread. Mostly empty. Any thread adds and removes, in single
operations."""


def prepare() -> None:
    """Prepare a call, before its code begins."""
    for each in list(before):
        each()


def explained(error: BaseException) -> BaseException | None:
    """Return the error that a call should show in place of another; None for the error itself."""
    try:
        return on_error(error)
    except Exception:
        # It imports modules, say without file descriptors; the call is answered all the same.
        return None
