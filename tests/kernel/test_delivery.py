"""Signals on their way to ranks: a cell that waits for them may be stopped, and the next one waits again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch._node.current import current_node
from monarch._node.liveness import here
from monarch._node.services.asking import ask_soon
from monarch._node.services.registry import request
from monarch.actor import Actor, endpoint
from monarch_kernel.calls.delivery import await_delivery, deliver

SOON = 20


class Echo(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(wait: Callable[[], Any]) -> None:
    """Interrupt a wait of this thread."""
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()


def test_wait_for_a_signal_that_was_stopped_is_resumed(procs: Any, interrupts: None) -> None:
    procs(1).spawn("echo", Echo).pid.call_one().get(timeout=SOON)
    node = current_node()
    agent = node.peers.pids[node.agent]
    os.kill(agent, signal.SIGSTOP)
    try:
        deliver([f"{node.host}/none.0"], signal.SIGCONT)
        interrupted(await_delivery)
        assert await_delivery() == [node.host]
    finally:
        os.kill(agent, signal.SIGCONT)
    assert await_delivery() == []


def test_questions_that_are_interrupted_leave_no_port(procs: Any, interrupts: None) -> None:
    pid = procs(1).spawn("echo", Echo).pid.call_one().get(timeout=SOON)
    node = current_node()
    (proc,) = [proc for proc, known in node.peers.pids.items() if known == pid]
    before = len(node.ports.sinks)
    os.kill(pid, signal.SIGSTOP)
    try:
        interrupted(lambda: ask_soon([proc], request(here), 10.0))
        assert len(node.ports.sinks) <= before
    finally:
        os.kill(pid, signal.SIGCONT)
