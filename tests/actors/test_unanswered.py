"""An error outside an endpoint, of a trace function or a signal handler: its call is answered, and the next one too."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections import Counter, deque
from typing import Any

import pytest

from leaks import wait_until
from monarch._actors.table import actors_of
from monarch._node.current import current_node
from monarch._node.replies.replies import Replies
from monarch._wire.receiving.aside import tell_error
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, StoppedError


class LateAlarm(Exception):
    pass


def fail_call(*_: Any) -> None:
    raise LateAlarm("in a trace function")


def fail_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


answered: Counter[int] = Counter()
"""In a rank: how often it has answered each port since ``ring_at_answers``."""


def ring_at_answers() -> None:
    """Let a signal handler raise after each answer but the next one has gone out."""

    def ring(*_: Any) -> None:
        raise LateAlarm("at an answer")

    def send(to: str, port: int, *rest: Any) -> None:
        Replies.send(replies, to, port, *rest)
        answered[port] += 1
        if len(answered) > 1:
            signal.raise_signal(signal.SIGUSR1)

    replies: Any = current_node().replies
    signal.signal(signal.SIGUSR1, ring)
    replies.send = send


def answers() -> list[int]:
    replies: Any = current_node().replies
    del replies.send
    return list(answered.values())


class Sync(Actor):
    @endpoint
    def ring(self) -> None:
        ring_at_answers()

    @endpoint
    def answers(self) -> list[int]:
        return answers()

    @endpoint
    def fail(self) -> None:
        raise ValueError("in the endpoint")

    @endpoint
    def add(self, value: int) -> int:
        return value + 1

    @endpoint
    def trace(self) -> None:
        sys.settrace(fail_call)

    @endpoint
    def ring_at_taking(self, kind: type[Exception]) -> None:
        """Let a signal handler raise as the next message has been taken from the queue."""

        def ring(*_: Any) -> None:
            raise kind("as it was taken")

        class Queue(deque[Any]):
            def remove(self, value: Any, /) -> None:
                super().remove(value)
                mailbox.queue = deque(self)
                signal.raise_signal(signal.SIGUSR1)

        mailbox = next(iter(actors_of(current_node()).here.values()))
        signal.signal(signal.SIGUSR1, ring)
        mailbox.queue = Queue(mailbox.queue)

    @endpoint
    def break_wait(self) -> None:
        """Raise between two messages, once, as a signal handler may."""
        executor: Any = next(iter(actors_of(current_node()).here.values())).executor
        wait = executor._wait

        def fail() -> None:
            executor._wait = wait
            raise LateAlarm("between messages")

        executor._wait = fail

    @endpoint
    def break_threads(self) -> None:
        """Start no more threads, as at the limit of the system, nor by a name that user code has replaced."""
        threading._start_new_thread = fail_thread  # pyright: ignore
        threading.Thread = None  # pyright: ignore

    @endpoint
    def tell(self) -> list[str]:
        tell_error(LateAlarm("told"))
        return [thread.name for thread in threading.enumerate()]

    @endpoint
    def break_output(self) -> None:
        outbox: Any = current_node().output.idle.__self__
        outbox._send = fail_call
        print("lost")


ALARMED = """
import signal, time
from contextlib import suppress
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import ActorError

class Alarmed(Actor):
    @endpoint
    def arm(self, seconds):
        def ring(*_):
            raise OverflowError("a handler")

        signal.signal(signal.SIGALRM, ring if seconds else signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)

    @endpoint
    def add(self, value):
        return value + 1

actor = this_host().spawn_procs().spawn("actor", Alarmed)
actor.arm.call_one(0.003).get(20)
errors, until = 0, time.monotonic() + 10
while time.monotonic() < until:
    try:
        assert actor.add.call_one(1).get(10) == 2
    except ActorError as error:
        assert "a handler" in str(error)
        errors += 1
print("answered", errors > 10)
while True:
    with suppress(ActorError):
        actor.arm.call_one(0).get(10)
        break

from monarch._node.current import current_node
from monarch._node.services.asking import ask_proc
from monarch._session.statistics import account_of

node = current_node()
(proc,) = {proc for proc, peer in node.peers.known.items() if peer.sent > 100}
peer = node.peers.known[proc]

def off():
    # The question is not among those that it counts.
    sent = peer.sent
    return sum(ask_proc(peer.proc, account_of, node.proc).get(10)) - sent

until = time.monotonic() + 5
while off() and time.monotonic() < until:
    time.sleep(0.01)
print("counted", off())
"""


class Async(Actor):
    @endpoint
    async def add(self, value: int) -> int:
        return value + 1

    @endpoint
    async def ring(self) -> None:
        ring_at_answers()

    @endpoint
    async def answers(self) -> list[int]:
        return answers()

    @endpoint
    async def fail(self) -> None:
        raise ValueError("in the endpoint")

    @endpoint
    async def trace(self) -> None:
        sys.settrace(fail_call)

    @endpoint
    async def break_loop_once(self) -> None:
        loop: Any = asyncio.get_running_loop()
        step = loop._run_once

        def fail() -> None:
            loop._run_once = step
            raise LateAlarm("between tasks")

        loop._run_once = fail


@pytest.mark.parametrize("kind", [Sync, Async])
def test_call_is_answered_when_a_trace_function_raises(procs: Any, kind: Any) -> None:
    actor = procs(1).spawn("actor", kind).slice(gpus=0)
    # The next function that is called raises it: one of this package, inside or outside of the call.
    with pytest.raises(ActorError, match=r"LateAlarm: in a trace function"):
        actor.trace.call_one().get(20)
    assert actor.add.call_one(1).get(20) == 2


@pytest.mark.parametrize("kind", [Sync, Async])
def test_call_is_answered_once_when_a_handler_raises_at_it(procs: Any, kind: Any) -> None:
    actor = procs(1).spawn("actor", kind).slice(gpus=0)
    actor.ring.call_one().get(20)
    assert [actor.add.call_one(at).get(20) for at in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(ActorError, match="in the endpoint"):
        actor.fail.call_one().get(20)
    assert actor.answers.call_one().get(20) == [1] * 7


@pytest.mark.parametrize("kind", [OverflowError, ValueError])
def test_call_is_answered_when_a_handler_raises_as_it_is_taken(procs: Any, kind: type[Exception]) -> None:
    """Also an error that looks like that of a queue without it."""
    actor = procs(1).spawn("actor", Sync).slice(gpus=0)
    actor.ring_at_taking.call_one(kind).get(20)
    with pytest.raises(ActorError, match="as it was taken"):
        actor.add.call_one(1).get(20)
    assert actor.add.call_one(1).get(20) == 2


@pytest.mark.parametrize(("kind", "method"), [(Sync, "break_wait"), (Async, "break_loop_once")])
def test_rank_survives_an_error_between_messages(
    procs: Any, kind: Any, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    actor = procs(1).spawn("actor", kind).slice(gpus=0)
    getattr(actor, method).call_one().get(20)
    assert [actor.add.call_one(at).get(20) for at in range(3)] == [1, 2, 3]
    shown: list[str] = []
    assert wait_until(lambda: shown.append(capfd.readouterr().err) or "LateAlarm: between" in "".join(shown))


@pytest.mark.wide
def test_calls_are_answered_once_while_handlers_raise(program: Any) -> None:
    assert program(ALARMED, timeout=60).ok().split() == ["answered", "True", "counted", "0"]


def test_answer_arrives_when_output_cannot_be_sent(procs: Any) -> None:
    actor = procs(1).spawn("actor", Sync).slice(gpus=0)
    actor.break_output.call_one().get(20)
    assert [actor.add.call_one(at).get(20) for at in range(3)] == [1, 2, 3]


def test_rank_that_starts_no_threads_names_that_and_goes_on(procs: Any) -> None:
    mesh = procs(1)
    actor = mesh.spawn("actor", Sync).slice(gpus=0)
    actor.break_threads.call_one().get(20)
    other = mesh.spawn("other", Sync)
    with pytest.raises(StoppedError, match=r"could not start a thread for it \(.*; see ulimit -u"):
        other.add.call(1).get(20)
    with pytest.raises(ActorError, match="can't start new thread"):
        other.initialized.get(20)
    assert "monarch-receive" in actor.tell.call_one().get(20)
    assert actor.add.call_one(1).get(20) == 2
