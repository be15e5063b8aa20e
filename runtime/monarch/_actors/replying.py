"""Answers the messages of an actor: a value or an error for each, and its credit."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch._actors.ending import (
    ends_actor,
    pack_end,
    pack_unreadable,
    pack_unsent,
    raised_by_us,
    refuse,
    unpicklable,
)
from monarch._actors.endpoint import FUNCTION, Method
from monarch._actors.ports import ReplyPort
from monarch._actors.running import explained
from monarch._core.shapes.extent import Point
from monarch._node.node import Node
from monarch._node.rank_config import ActorSpec
from monarch._node.remote_errors import TellsFailure, is_consequence, pack_failure
from monarch._procs.zygote import user_forks
from monarch._procs.zygote.user_forks import leave_if_forked
from monarch._python.later import asyncio
from monarch._wire import messages as m
from monarch._wire.pickling import ATOMS, LARGEST_BODY, beside, dumps
from monarch.exceptions import MonarchError, PointError

if TYPE_CHECKING:
    from monarch._actors.executors import ActionExecutor

_PLACES = 4096
_TRIES = 5
"""Times to defer signal handlers while these raise."""


class Replying:
    """Answers the messages of one actor, in the actor's thread.

    Args:
        node: the node of this process.
        key: the key of the actor's mesh.
        executor: the thread or event loop for its code.
    """

    def __init__(self, node: Node, key: str, executor: ActionExecutor) -> None:
        self.node = node
        self.key = key
        self.executor = executor
        self.spec: ActorSpec | None = None
        self.rank = 0
        self.failed: bytes | None = None
        self._signals = node.receive_loop.signals
        self._places: dict[bytes, int] = {}
        self._unanswered: m.Call | None = None
        """The message that the actor has taken and not answered yet, if it is not on an event loop."""
        self._answered: m.Call | None = None
        """The last message that was answered while handlers of signals were deferred."""
        self.ending: str | None = None
        """Why messages are refused. Any thread sets it, before ``_odd``; it never changes back."""
        self._odd = False
        """Whether some messages are not handled: those that were dropped, or all. Set by any thread, last."""
        self._abandoned: dict[int, object] = {}
        """By identity, messages that were answered while their code continues, with a mark of the thread that answered
        them. Only grows, by single operations; the actor takes no message afterwards, so no identity comes again."""

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
                if self._defers():
                    send = partial(node.replies.send, call.src, call.port, place, status, body, buffers, call.cost)
                    self._answer_deferring(call, send)
                else:
                    node.replies.send(call.src, call.port, place, status, body, buffers, call.cost)
            except BaseException as error:
                if self._answered is call:
                    # A signal handler of the user has raised after that.
                    return
                # Nothing was sent or counted.
                plain = isinstance(error, (PointError, KeyboardInterrupt))
                self._answer_cut(call, error if plain else unpicklable(self.title(), call, error))
        elif self._defers():
            self._answer_deferring(call, partial(node.replies.finished, call.src, call.cost, False))
        else:
            node.replies.finished(call.src, call.cost, False)

    def _defers(self) -> bool:
        """Return whether a signal handler of the user may raise while an answer is sent.

        Not known for the very call that sets a handler. An event loop does not look for handlers.
        """
        return self._signals.may_raise or self.executor.loop is not None

    def _answer_deferring(self, call: m.Call, answer: Callable[[], object]) -> None:
        """Send an answer with signal handlers deferred, and print their errors.

        A handler that raises midway would have the call answered and counted twice.
        """
        held = self._hold()
        try:
            answer()
            self._answered = call
            if self._unanswered is call:
                self._unanswered = None
        finally:
            self._let_go(held)

    def _hold(self) -> Any:
        """Defer signal handlers of the main thread, of which one may raise before this has done so."""
        for _ in range(_TRIES):
            try:
                return self.node.receive_loop.hold()
            except BaseException:
                # The error of a handler, which has no receiver here.
                continue
        return None

    def _let_go(self, held: Any) -> None:
        """Run the handlers that were deferred for an answer. It has been sent, so nobody receives their errors."""
        try:
            self.node.receive_loop.let_go(held)
        except BaseException:
            # Not in a function of its own: see ActionExecutor.run.
            try:
                traceback.print_exc()
            except BaseException:
                pass

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
        self._answer_deferring(call, partial(self._fail_call, call, failure, ends))

    def _fail_call(self, call: m.Call, failure: bytes, ends: bool) -> None:
        """Answer a message with an error.

        Args:
            call: the message.
            failure: the error.
            ends: whether it ends the actor; so does one that nobody waits for.
        """
        self.node.replies.finished(call.src, call.cost, bool(call.port))
        if call.port:
            answer = pack_end(self.title(), call.method, failure) if ends else failure
            self.node.replies.answer(call.src, call.port, call.view, m.ERROR, answer)
        if ends or not call.port:
            self.fail(failure)

    def _is_abandoned(self, call: m.Call) -> bool:
        return self._odd and id(call) in self._abandoned

    def _answer_cut(self, call: m.Call, error: BaseException) -> None:
        """Answer a message whose code raised, and say if the actor's end cut it short."""
        if self.ending is not None and isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
            if id(call) not in self._abandoned:
                fate = "the call was interrupted while it ran, and may be partly done"
                self._answer_deferring(call, partial(refuse, self.node, call, self.ending, fate))
        else:
            self._answer_error(call, error)

    def _answer_broken(self, call: m.Call, error: BaseException) -> None:
        """Answer a message after an error between its endpoint and its answer."""
        leave_if_forked(error)
        if id(call) not in self._abandoned:
            self._answer_deferring(call, partial(self._fail_call, call, pack_unsent(error), False))

    def fail(self, failure: bytes) -> None:
        """Mark the actor failed and tell its owner, since nobody waits for an answer and its state may be broken."""
        if self.failed is None:
            self.failed = failure
            owner = self.spec.owner if self.spec is not None else self.node.root
            self.node.peers.get(owner).send(m.encode(m.Fault(self.node.proc, self.key, self.rank, failure)))
