"""Signal handlers that raise while the main thread receives: no message is lost, and the error reaches the wait."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from monarch._wire.deferred_signals import DeferredSignals
from monarch._wire.links import Inbox, Link, make_context
from receive_loops import GUARD, Background, Rig

MESSAGES = 4000


class Rang(Exception):
    """The handler's exception."""


_armed: list[bool] = []


def ring(_number: int, _frame: FrameType | None) -> None:
    """Raise, once for each time that it is armed."""
    if _armed:
        _armed.pop()
        raise Rang


def rings(work: Callable[[], object]) -> bool:
    """Run something that the handler may interrupt; return whether it did."""
    try:
        try:
            _armed.append(True)
            work()
        finally:
            _armed.clear()
    except Rang:
        return True
    return False


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.fixture
def alarm() -> Iterator[None]:
    """A handler of SIGALRM that raises; SIGALRM is blocked except where a test admits it."""
    old = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def test_no_message_is_lost_when_handler_raises(rig: Rig, alarm: None) -> None:
    """The handler raises many times in the middle of receiving; each message is still handled, in order."""
    box = rig.box(MESSAGES)
    sender = Background(lambda: [rig.send(f"say {number}") for number in range(MESSAGES)] and rig.send(MESSAGES))
    raised = 0
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    while not box.done:
        raised += rings(lambda: rig.receive_loop.wait(box, GUARD))
    signal.setitimer(signal.ITIMER_REAL, 0)
    sender.join()
    assert raised
    assert rig.seen == [*(b"say %d" % number for number in range(MESSAGES)), str(MESSAGES).encode()]


def test_hold_defers_after_a_wait_without_handlers(rig: Rig) -> None:
    """As a rank waits for its next call, and then runs one that sends calls itself."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    old = {number: signal.signal(number, signal.SIG_IGN) for number, each in handlers.items() if callable(each)}
    try:
        rig.receive_loop.wait(rig.box(1), 0.01)
        old.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, ring))
        held = rig.receive_loop.hold()
        assert signal.getsignal(signal.SIGALRM) is not ring
        rig.receive_loop.let_go(held)
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def test_handlers_are_back_after_wait(rig: Rig, alarm: None) -> None:
    rig.receive_loop.wait(rig.box(1), 0.01)
    assert signal.getsignal(signal.SIGALRM) is ring
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_both_deferred_handlers_run(alarm: None) -> None:
    """The second one's error has the first as its context."""

    def other(_number: int, _frame: FrameType | None) -> None:
        raise ValueError

    old = signal.signal(signal.SIGUSR1, other)
    held = DeferredSignals(lambda: None)
    try:
        found = held.begin()
        _armed.append(True)
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(ValueError) as error:
            held.end_and_run(found)
        assert isinstance(error.value.__context__, Rang)
        assert signal.getsignal(signal.SIGALRM) is ring and signal.getsignal(signal.SIGUSR1) is other
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_handlers_that_alternate_are_each_deferred(alarm: None) -> None:
    """As IPython's for SIGINT in cells and between them."""
    ran: list[str] = []
    handlers = {name: (lambda _number, _frame, name=name: ran.append(name)) for name in ("one", "other", "third")}
    old = signal.getsignal(signal.SIGUSR1)
    held = DeferredSignals(lambda: None)
    try:
        for name in ("one", "other", "one", "other", "third", "other", "one", "third"):
            signal.signal(signal.SIGUSR1, handlers[name])
            found = held.begin()
            signal.raise_signal(signal.SIGUSR1)
            assert not ran
            assert held.end_and_run(found)
            assert ran == [name] and signal.getsignal(signal.SIGUSR1) is handlers[name]
            ran.clear()
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_handler_may_wait_for_an_answer(rig: Rig) -> None:
    inner, outer = rig.box(1), rig.box(2)
    waited: list[bool] = []

    def wait(_number: int, _frame: FrameType | None) -> None:
        rig.send(1)
        waited.append(rig.receive_loop.wait(inner, GUARD))
        rig.send(2)

    old = signal.signal(signal.SIGALRM, wait)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert rig.receive_loop.wait(outer, GUARD)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert waited == [True]


def test_message_is_sent_whole_when_handler_raises(tmp_path: Path, alarm: None) -> None:
    """A message of many frames that is cut in two would be joined to the next one."""
    context = make_context()
    inbox = Inbox(context, f"ipc://{tmp_path}/inbox")
    link = Link(context, f"ipc://{tmp_path}/inbox", b"hello")
    more = [b"part"] * 40
    sent = raised = 0
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    while sent < 3000 or raised < 20:
        raised += rings(lambda: link.send(b"first", more))
        sent += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    link.send(b"last")
    assert inbox.socket.recv() == b"hello"
    while (message := inbox.socket.recv_multipart()) != [b"last"]:
        assert message == [b"first", *more]
    link.close()
    inbox.close()
    context.term()


RANK = """
import os, signal, sys, time
from monarch.actor import Actor, endpoint, this_host, shutdown_context

class Late(Exception):
    pass

def late(*_):
    open(sys.argv[1], "w").close()
    raise Late("too late")

class Counter(Actor):
    def __init__(self):
        self.count = 0

    @endpoint
    def arm(self, path):
        sys.argv[1:] = [path]
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    @endpoint
    def add(self):
        self.count += 1
        return self.count

if __name__ == "__main__":
    a = this_host().spawn_procs({"gpus": 1}).spawn("counter", Counter)
    a.arm.call_one(sys.argv[1]).get(timeout=30)
    for _ in range(3000):
        if os.path.exists(sys.argv[1]): break
        time.sleep(0.01)
    print([a.add.call_one().get(timeout=30) for _ in range(3)])
    shutdown_context().get(timeout=30)
"""


@pytest.mark.slow
def test_rank_survives_alarm_between_endpoints(tmp_path: Path) -> None:
    """The handler's error goes to the rank's stderr, since no user code waits there."""
    path = tmp_path / "program.py"
    path.write_text(RANK)
    arguments = [sys.executable, str(path), str(tmp_path / "rang")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[1, 2, 3]\n"
    assert "Late: too late" in done.stderr
    assert done.returncode == 0
