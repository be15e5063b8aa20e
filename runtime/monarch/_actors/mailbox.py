"""The mailbox of an actor: its queue, the message it handles, and the thread or loop that runs it."""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from monarch._actors.ending import (
    cause_of_end,
    ends_actor,
    failed_actor,
    pack_end,
    pack_unreadable,
    pack_unsent,
    raised_by_us,
    refuse,
    reject,
    unpack_text,
    unpicklable,
)
from monarch._actors.endpoint import Method, methods_of
from monarch._actors.escape import forget_interrupt
from monarch._actors.halting import Halting
from monarch._actors.interrupts import raised
from monarch._actors.pausing.gate import gate
from monarch._actors.ports import ReplyPort
from monarch._actors.running import before, current, explained, prepare
from monarch._actors.turns import Turns
from monarch._core.kinds import class_of
from monarch._core.shapes.extent import Point
from monarch._node.node import Node
from monarch._node.rank_config import ActorSpec
from monarch._node.remote_errors import TellsFailure, is_consequence, pack_failure
from monarch._node.services.registry import function_of
from monarch._procs.zygote import user_forks
from monarch._procs.zygote.user_forks import leave_if_forked
from monarch._python.later import asyncio
from monarch._wire import messages as m
from monarch._wire.pickling import ATOMS, LARGEST_BODY, beside, dumps, dumps_whole, loads
from monarch.exceptions import ArgumentError, MonarchError, PointError

if TYPE_CHECKING:
    from monarch._actors.awaits import Awaits
    from monarch._actors.executors import ActionExecutor

EXPLICIT = 1
"""Flag of a Call: the method gets a port, whatever its decorator."""
UNDECORATED = 2
"""Flag of a Call: the method may lack a decorator."""
FUNCTION = 4
"""Flag of a Call: the method is a function, as ``module:name``, that gets the actor as its first argument."""
NOTHING = dumps_whole(None)


_PLACES = 4096
_TRIES = 5
"""Times to defer signal handlers while these raise."""


class Home(Protocol):
    """The actors of a process; see table.py."""

    @property
    def here(self) -> dict[str, Mailbox]: ...
    @property
    def gone(self) -> dict[str, str]: ...


class Mailbox:
    """One actor and its queue.

    Args:
        node: the node of this process.
        key: the key of its mesh; a process has at most one actor of a mesh.
        executor: the thread or event loop for its code.
        home: the actors of its process, from which it removes itself at its end.
    """

    def __init__(self, node: Node, key: str, executor: ActionExecutor, home: Home) -> None:
        self.node = node
        self._home = home
        self.key = key
        self.executor = executor
        self._post = executor.post
        executor.on_lost = self.lose_thread
        self.spec: ActorSpec | None = None
        self.rank = 0
        self.instance: Any = None
        self.running: m.Call | None = None
        self._unanswered: m.Call | None = None
        """The message that ``run`` has taken and not answered yet. In the actor's thread."""
        self.since = 0.0
        """When the message with the turn began; written by the actor's thread."""
        self.queue: deque[m.Call] = deque()
        self.owned: list[Any] = []
        self.failed: bytes | None = None
        self.at_end: dict[str, Callable[[], object]] = {}
        """Callbacks to run when the actor is gone, by name."""
        self._methods: dict[str, Method] = {}
        self._places: dict[bytes, int] = {}
        self.turns = Turns(self)
        """The messages on the event loop."""
        self.start = self.turns.start
        self.awaits: Awaits | None = None
        """The awaits of the endpoint with the turn; used by the loop's thread."""
        self.halting: Halting | None = None
        """The end of the actor, once it has begun."""
        self.ending: str | None = None
        """Why messages are refused. Any thread sets it, before ``_odd``; it never changes back."""
        self._odd = False
        """Whether some messages are not handled, as in ``ending`` or ``_dropped``. Set by any thread, last."""
        self._dropped: dict[int, m.Call] = {}
        """Queued messages that ``drop`` answers, by identity. Other threads add, the actor's thread removes."""
        self._abandoned: dict[int, object] = {}
        """By identity, messages that were answered while their code continues, with a mark of the thread that answered
        them. Only grows, by single operations; the actor takes no message afterwards, so no identity comes again."""
        self.blocked = False
        """Whether an endpoint blocks the event loop while it waits; written by the loop's thread."""
        self.left = False
        """Whether ``leave`` refuses the queue. Any thread sets it; it never changes back."""

    @property
    def is_coming(self) -> bool:
        """Whether the constructor is still to end; from any thread."""
        return self.instance is None and self.failed is None and not self.left

    def title(self) -> str:
        """Name and coordinates, as in ``trainers[gpus=3]``."""
        if self.spec is None:
            return self.key
        position = self.spec.region.position_of(self.rank)
        if position is None:
            # The mesh has shrunk.
            return f"{self.spec.name}[rank {self.rank}]"
        point = Point(position, self.spec.region.extent)
        at = ", ".join(f"{label}={point[label]}" for label in point)
        return f"{self.spec.name}[{at}]" if at else self.spec.name

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
        except ValueError:
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
        except ValueError:
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
            due, self._unanswered = self._unanswered is call or self._unqueue(call), None
            if due:
                self._answer_broken(call, error)
            return due
        finally:
            self.node.receive_loop.let_go(held)

    def _hold(self) -> Any:
        """Defer signal handlers of the main thread, of which one may raise before this has done so."""
        for _ in range(_TRIES):
            try:
                return self.node.receive_loop.hold()
            except BaseException:
                # The error of a handler, which has no receiver here.
                continue
        return None

    def _answer_broken(self, call: m.Call, error: BaseException) -> None:
        leave_if_forked(error)
        if id(call) not in self._abandoned:
            self.node.replies.finished(call.src, call.cost, bool(call.port))
            failure = pack_unsent(error)
            if call.port:
                self.node.replies.answer(call.src, call.port, call.view, m.ERROR, failure)
            else:
                self.fail(failure)

    async def run_async(self, call: m.Call, more: Sequence[Any]) -> None:
        """Handle a message as a task of the event loop."""
        if (self._odd and self.is_refused(call)) or not self._unqueue(call):
            # The loop was blocked since the task was created, and the actor has stopped meanwhile.
            return
        self.running = call
        current.set((self, call))
        executor = self.executor
        task = asyncio.current_task(executor.loop)
        assert task is not None
        try:
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
            self._answer_broken(call, error)
        finally:
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

    def _is_abandoned(self, call: m.Call) -> bool:
        return self._odd and id(call) in self._abandoned

    def _answer_cut(self, call: m.Call, error: BaseException) -> None:
        """Answer a message whose code raised, and say if the actor's end cut it short."""
        if self.ending is not None and isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
            if id(call) not in self._abandoned:
                refuse(self.node, call, self.ending, "the call was interrupted while it ran, and may be partly done")
        else:
            self._answer_error(call, error)

    def _method(self, call: m.Call) -> Method:
        if self.failed is not None:
            raise failed_actor(self, f"{self.title()} has already failed: {unpack_text(self.failed)}")
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

    def _port(self, call: m.Call) -> ReplyPort:
        return ReplyPort(self.node, call.src, call.port, self._place(call.view), f"{self.title()}.{call.method}()")

    def _place(self, view: bytes) -> int:
        place = self._places.get(view)
        if place is None:
            if len(self._places) > _PLACES:
                self._places.clear()
            position = self.node.replies.region_of(view).position_of(self.rank)
            if position is None:
                raise PointError(
                    f"{self.title()} received a message that was not sent to rank {self.rank}; report this as a bug"
                )
            place = self._places[view] = position
        return place

    # Answers

    def _answer(self, call: m.Call, method: Method, value: Any) -> None:
        if user_forks.is_child:
            leave_if_forked()
        node = self.node
        node.output.idle()
        if node.bulk.deferred or node.bulk.releases:
            node.bulk.settle()
        # The same as _is_abandoned(), which would be one more call for each message.
        if self._odd and id(call) in self._abandoned:
            return
        if call.port and not method.explicit:
            status = value.status if isinstance(value, TellsFailure) else m.RESULT
            try:
                if type(value) in ATOMS:
                    # The same as dumps(), without the call.
                    body, buffers = pickle.dumps(value, 5), ()
                    if len(body) > LARGEST_BODY:
                        body, buffers = beside(body)
                else:
                    with self.executor.user_code():
                        body, buffers = dumps(value, "", lambda: [call.src])
                    if self._is_abandoned(call):
                        return
                place = self._places.get(call.view)
                if place is None:
                    place = self._place(call.view)
                node.replies.send(call.src, call.port, place, status, body, buffers, call.cost)
            except BaseException as error:
                # Nothing was sent or counted.
                plain = isinstance(error, (PointError, KeyboardInterrupt))
                self._answer_cut(call, error if plain else unpicklable(self, call, error))
        else:
            node.replies.finished(call.src, call.cost, False)

    def _answer_error(self, call: m.Call, error: BaseException) -> None:
        leave_if_forked(error)
        node = self.node
        node.output.idle()
        node.bulk.settle()
        freed = explained(error)
        own = freed is None and isinstance(error, MonarchError) and raised_by_us(error)
        ends = ends_actor(error) and not call.flags & FUNCTION
        try:
            # Errors have code of the user, which may block.
            with self.executor.user_code():
                failure = pack_unreadable(error) if own else None
                failure = failure or pack_failure(freed or error, own, is_consequence(freed))
        except KeyboardInterrupt as interrupt:
            failure = pack_failure(interrupt)
        if self._is_abandoned(call):
            return
        # A handler that raises after the first line would have the call counted again, with another answer.
        held = self._hold()
        try:
            node.replies.finished(call.src, call.cost, bool(call.port))
            if ends:
                if call.port:
                    node.replies.answer(call.src, call.port, call.view, m.ERROR, pack_end(self, call.method, failure))
                self.fail(failure)
            elif call.port:
                node.replies.answer(call.src, call.port, call.view, m.ERROR, failure)
            else:
                self.fail(failure)
            if self._unanswered is call:
                self._unanswered = None
        finally:
            node.receive_loop.let_go(held)

    def fail(self, failure: bytes) -> None:
        """Mark the actor failed and tell its owner, since nobody waits for an answer and its state may be broken."""
        if self.failed is None:
            self.failed = failure
            owner = self.spec.owner if self.spec is not None else self.node.root
            self.node.peers.get(owner).send(m.encode(m.Fault(self.node.proc, self.key, self.rank, failure)))

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
