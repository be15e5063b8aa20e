"""The mailbox of an actor: its queue, the message it handles, and the thread or loop that runs it."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from monarch._actors.ending import (
    cause_of_end,
    failed_actor,
    refuse,
    reject,
    unpack_text,
)
from monarch._actors.endpoint import EXPLICIT, FUNCTION, UNDECORATED, Method, methods_of
from monarch._actors.escape import forget_interrupt
from monarch._actors.halting import Halting
from monarch._actors.interrupts import raised
from monarch._actors.pausing.gate import gate
from monarch._actors.replying import Replying
from monarch._actors.running import before, current, prepare
from monarch._actors.turns import Turns
from monarch._core.kinds import class_of
from monarch._node.node import Node
from monarch._node.rank_config import ActorSpec
from monarch._node.remote_errors import pack_failure
from monarch._node.services.registry import function_of
from monarch._python.later import asyncio
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_whole, loads
from monarch.exceptions import ArgumentError

if TYPE_CHECKING:
    from monarch._actors.awaits import Awaits
    from monarch._actors.executors import ActionExecutor

NOTHING = dumps_whole(None)


class Home(Protocol):
    """The actors of a process; see table.py."""

    @property
    def here(self) -> dict[str, Mailbox]: ...
    @property
    def gone(self) -> dict[str, str]: ...


class Mailbox(Replying):
    """One actor and its queue.

    Args:
        node: the node of this process.
        key: the key of its mesh; a process has at most one actor of a mesh.
        executor: the thread or event loop for its code.
        home: the actors of its process, from which it removes itself at its end.
    """

    # As declared in the base: it is set to None in places.
    spec: ActorSpec | None

    def __init__(self, node: Node, key: str, executor: ActionExecutor, home: Home) -> None:
        super().__init__(node, key, executor)
        self._home = home
        self._post = executor.post
        executor.on_lost = self.lose_thread
        self.instance: Any = None
        self.running: m.Call | None = None
        self.since = 0.0
        """When the message with the turn began; written by the actor's thread."""
        self.queue: deque[m.Call] = deque()
        self.owned: list[Any] = []
        self.at_end: dict[str, Callable[[], object]] = {}
        """Callbacks to run when the actor is gone, by name."""
        self._methods: dict[str, Method] = {}
        self.turns = Turns(self)
        """The messages on the event loop."""
        self.start = self.turns.start
        self.awaits: Awaits | None = None
        """The awaits of the endpoint with the turn; used by the loop's thread."""
        self.halting: Halting | None = None
        """The end of the actor, once it has begun."""
        self._dropped: dict[int, m.Call] = {}
        """Queued messages that ``drop`` answers, by identity. Other threads add, the actor's thread removes."""
        self.blocked = False
        """Whether an endpoint blocks the event loop while it waits; written by the loop's thread."""
        self.left = False
        """Whether ``leave`` refuses the queue. Any thread sets it; it never changes back."""

    @property
    def is_coming(self) -> bool:
        """Whether the constructor is still to end; from any thread."""
        return self.instance is None and self.failed is None and not self.left

    def take_spec(self, spec: ActorSpec) -> None:
        """Learn what the actor is, before its construction."""
        self.spec = spec
        self._methods = methods_of(spec.cls)
        self.rank = spec.procs.rank_of(self.node.proc)

    def take_class(self, cls: type) -> None:
        """Switch to a new version of the actor's class."""
        assert self.spec is not None
        self.spec.cls = cls
        self._methods = methods_of(cls)

    # Messages

    def deliver(self, call: m.Call, more: Sequence[Any]) -> None:
        """Queue a message, in the thread that received it."""
        self.queue.append(call)
        self.executor.deliver(self, call, more)
        if self._odd and self.left:
            # The actor has left meanwhile and no longer reads its queue.
            self.leave(self.ending or "")

    def state_of(self, proc: str, port: int) -> str | None:
        """Return the state of a request: see monarch._core.deadlock. None even if others can be handled meanwhile."""
        for running in (self.running, self.turns.call):
            if running is not None and running.port == port and running.src == proc:
                return "explicit" if self._is_explicit(running) else "running"
        for call in list(self.queue):
            if call.port == port and call.src == proc:
                # A blocked loop delays concurrent endpoints too.
                return "queued" if self.blocked or not self.is_concurrent(call) else None
        return None

    def _is_explicit(self, call: m.Call) -> bool:
        method = self._methods.get(call.method)
        return bool(call.flags & EXPLICIT) or (method is not None and method.explicit)

    def is_concurrent(self, call: m.Call) -> bool:
        """Return whether a message may run concurrently with others."""
        method = self._methods.get(call.method)
        return method is not None and method.concurrent and not call.flags & FUNCTION

    def is_refused(self, call: m.Call) -> bool:
        """Return whether a message must not be handled; it has been answered. In the actor's thread."""
        if not self._odd:
            return False
        if id(call) in self._dropped:
            self._dropped.pop(id(call), None)
            return True
        if self.ending is not None:
            if self._unqueue(call):
                refuse(self.node, call, self.ending)
            return True
        return False

    def drop(self, src: str, port: int) -> bool:
        """Answer the queued messages of a caller instead of handling them, and return whether there are any.

        At once, even if the actor is busy: in the thread that received the request.
        """
        dropped = [call for call in list(self.queue) if call.port == port and call.src == src]
        for call in dropped:
            self._dropped[id(call)] = call
            self._odd = True
            # The thread that dequeues it answers it.
            if not self._unqueue(call):
                self._dropped.pop(id(call), None)
            else:
                reject(self.node, call, KeyboardInterrupt("interrupted before it began"), False)
        return bool(dropped)

    def cancelled(self, call: m.Call, why: str) -> None:
        """Answer a message that was cancelled before it began; on the event loop."""
        if not self._unqueue(call):
            return
        if self.ending is not None:
            refuse(self.node, call, self.ending)
        else:
            self._answer_error(call, asyncio.CancelledError(why))

    def refuse_rest(self, reason: str) -> None:
        """Let no further message begin; from any thread."""
        self.ending = reason
        self._odd = True

    def _unqueue(self, call: m.Call) -> bool:
        """Remove a message from the queue, whose order may differ from the executor's if two senders raced.

        Return False if ``leave`` or ``drop`` was faster and has answered it.
        """
        try:
            self.queue.remove(call)
        except ValueError as error:
            if not _is_missing(error):
                raise
            return False
        return True

    def run(self, call: m.Call, more: Sequence[Any]) -> None:
        """Handle a message with a sync method, in the actor's thread."""
        if self._odd and self.is_refused(call):
            self._dropped.pop(id(call), None)
            return
        self._unanswered = call
        try:
            self.queue.remove(call)
        except ValueError as error:
            if not _is_missing(error):
                raise
            # It was answered: see _unqueue.
            self._unanswered = None
            self._dropped.pop(id(call), None)
            return
        self.running = call
        self.since = monotonic()
        executor = self.executor
        interrupts = executor.interrupts
        token = current.set((self, call))
        try:
            method = self._methods.get(call.method)
            if method is None or call.flags or self.failed is not None:
                method = self._method(call)
            if call.bulk is not None:
                more = self.node.bulk.open(call.bulk)
            executor.interruptible = True
            if interrupts is not None:
                interrupts.enter()
            if gate.wanted:
                gate.enter(method.function)
            if before:
                prepare()
            try:
                # Unpickling may run code of the user that blocks.
                args, kwargs = loads(call.body, more)
                more = ()
                if method.explicit:
                    value = method.function(self.instance, self._port(call), *args, **kwargs)
                else:
                    value = method.function(self.instance, *args, **kwargs)
                # Release the call's buffers before the answer says that it is done. A __del__ may block.
                args = kwargs = None
            finally:
                executor.interruptible = False
                if interrupts is not None:
                    interrupts.leave()
        except BaseException as error:
            executor.interruptible = False
            if interrupts is not None:
                # Again, if an interrupt came while leaving.
                interrupts.leave()
            self._answer_cut(call, error)
        else:
            self._answer(call, method, value)
        finally:
            current.reset(token)
            self.running = None
            if self._answered is not None:
                self._answered = None
            if self._dropped:
                # It had begun before the drop.
                self._dropped.pop(id(call), None)
            if raised:
                # It holds the frames of the call.
                forget_interrupt()
        self._unanswered = None

    def answer_broken(self, call: m.Call, error: BaseException) -> bool:
        """Answer a message if an error outside its endpoint has kept ``run`` from that; return whether it was due.

        Such an error comes from a trace function or a signal handler of the user, for example, or is a bug.
        """
        held = self._hold()
        try:
            due = self._unanswered is call or self._unqueue(call)
            if due:
                self._answer_broken(call, error)
            return due
        finally:
            self._let_go(held)

    async def run_async(self, call: m.Call, more: Sequence[Any]) -> None:
        """Handle a message as a task of the event loop."""
        if self._odd and self.is_refused(call):
            return
        try:
            if not self._unqueue(call):
                # The loop was blocked since the task was created, and the actor has stopped meanwhile.
                self._answered = call
                return
            self.running = call
            current.set((self, call))
            executor = self.executor
            task = asyncio.current_task(executor.loop)
            assert task is not None
            try:
                method = self._method(call)
                if call.bulk is not None:
                    more = self.node.bulk.open(call.bulk)
                ports = (self._port(call),) if method.explicit else ()
                try:
                    executor.package_tasks.discard(task)
                    if gate.wanted:
                        gate.enter(method.function)
                    if before:
                        prepare()
                    args, kwargs = loads(call.body, more)
                    more = ()
                    value = method.function(self.instance, *ports, *args, **kwargs)
                    if isinstance(value, Coroutine):
                        self.running = self.turns.call
                        args = kwargs = None
                        # An endpoint returns anything.
                        value = await value  # pyright: ignore[reportUnknownVariableType]
                    args = kwargs = None
                finally:
                    executor.end_user_code(task)
            except BaseException as error:
                # Again, if an interrupt came while leaving.
                executor.end_user_code(task)
                self._answer_cut(call, error)
            else:
                self._answer(call, method, value)
        except BaseException as error:
            # Else it is the error of a signal handler of the user, after the answer was sent.
            if self._answered is not call:
                with contextlib.suppress(ValueError):
                    self.queue.remove(call)
                self._answer_broken(call, error)
        finally:
            self._answered = None
            if self.running is call:
                self.running = None
            self.turns.finished(call)

    def abandon(self, calls: Iterable[m.Call]) -> None:
        """Answer messages whose code continues after the actor's stop; later answers are not sent."""
        mark = object()
        for call in calls:
            self._odd = True
            if self._abandoned.setdefault(id(call), mark) is mark:
                refuse(self.node, call, self.ending, "the call had begun, and its code is still running")

    def _method(self, call: m.Call) -> Method:
        if self.failed is not None:
            raise failed_actor(self.title(), f"{self.title()} has already failed: {unpack_text(self.failed)}")
        method = self._methods.get(call.method)
        if method is not None and not call.flags:
            return method
        if call.flags & FUNCTION:
            return Method(function_of(call.method), False, False, False)
        if call.flags & UNDECORATED:
            function = getattr(class_of(self.instance), call.method, None)
            function = getattr(function, "method", function)
            if callable(function):
                coroutine = inspect.iscoroutinefunction(function)
                if coroutine and self.executor.loop is None:
                    raise ArgumentError(
                        f"{self.title()}.{call.method} is async, but an actor without async endpoints has no event loop"
                    )
                return Method(function, coroutine, bool(call.flags & EXPLICIT), False)
        names = ", ".join(sorted(self._methods)) or "none"
        raise ArgumentError(f"{self.title()} has no endpoint {call.method!r}; it has {names}")

    # Life

    def halt(
        self,
        reason: str,
        stopped: Callable[[bytes | None], None],
        process: bool = False,
        drain: float | None = None,
    ) -> None:
        """Stop the actor after earlier messages, then report the end and any failure of its cleanup.

        Args:
            reason: for callers.
            stopped: called at the end, in any thread.
            process: whether its process ends with it.
            drain: seconds for the earlier messages; None for the setting.
        """
        if self.halting is None or not self.halting.also(stopped):
            self.halting = Halting(self, reason, stopped, process, drain)
            self.halting.begin()

    def end_cause(self) -> Exception | None:
        """Return the error that the actor has failed with, for its ``__cleanup__``."""
        return cause_of_end(self.failed)

    def leave(self, reason: str) -> None:
        """Refuse queued and later messages. From any thread, and more than once."""
        node = self.node
        self.left = True
        self.refuse_rest(reason)
        self._home.gone[self.key] = reason
        self._home.here.pop(self.key, None)
        with contextlib.suppress(IndexError):
            while True:
                refuse(node, self.queue.popleft(), reason)

    def lose_thread(self, error: BaseException) -> None:
        """Refuse all messages and tell the owner, since this error ends the actor's thread."""
        self.leave(f"its event loop failed: {type(error).__name__}: {error}")
        self.abandon(list(self.turns.tasks.values()))
        self.fail(pack_failure(error))

    def let_go(self) -> None:
        """Drop the instance and run the callbacks of ``at_end``; the last step of the actor's thread."""
        self.node.output.idle()
        try:
            with self.executor.user_code():
                # Python reports an interrupt of a __del__, and continues.
                self.instance = None
        except KeyboardInterrupt:
            self.instance = None
        # Each may remove itself.
        for action in list(self.at_end.values()):
            action()


def _is_missing(error: ValueError) -> bool:
    """Return whether ``deque.remove`` has raised an error, and not a signal handler of the user as it returned."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None
