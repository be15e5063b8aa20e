"""Calls to what is gone already as they are made: they fail, and nobody waits for an answer that cannot come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HEAD = """
import os, signal, threading, time
from monarch.actor import Actor, context, endpoint, get_or_spawn_controller, shutdown_context, this_host, this_proc
from monarch.exceptions import CallTimeoutError, DeviceMeshError
from monarch.job import keep, end
from monarch._node.current import current_node

def outcome(call):
    try:
        return f"answered {call().get(timeout=20)}"
    except BaseException as error:
        return type(error).__name__

class Echo(Actor):
    @endpoint
    def say(self, seconds=0):
        time.sleep(seconds)
        return 1
"""
LEFT = """
if __name__ == "__main__":
    mesh = keep("left", 60)
    try:
        echo = mesh.hosts.spawn_procs({"gpus": 1}).spawn("echo", Echo)
        echo.say.call_one().get()
        pending = echo.say.call_one(600)
        mesh.leave()
        print(outcome(lambda: pending), outcome(echo.say.call_one))
    finally:
        end("left")
    shutdown_context().get(20)
"""
AGENT_DEAD = """
class Owner(Actor):
    @endpoint
    def make(self):
        self.inner = this_host().spawn_procs({"gpus": 1}, name="inner").spawn("echo", Echo)
        self.inner.initialized.get()
        return self.inner

if __name__ == "__main__":
    from monarch._session.session import session_of

    inner = this_host().spawn_procs({"gpus": 1}).spawn("owner", Owner).make.call_one().get()
    node = current_node()
    os.kill(session_of(node).agent_pid, signal.SIGKILL)
    while node.peers.get(node.agent).dead is None:
        time.sleep(0.01)
    print(outcome(inner.say.call_one))
    shutdown_context().get(20)
"""
PROGRAM_GONE = """
class Inner(Actor):
    @endpoint
    def ask(self, echo):
        return outcome(echo.say.call_one), outcome(lambda: get_or_spawn_controller("keeper", Echo))

class Outer(Actor):
    @endpoint
    def later(self, path, echo):
        def run():
            while current_node().peers.get(current_node().root).dead is None:
                time.sleep(0.01)
            old = outcome(echo.say.call_one), outcome(lambda: get_or_spawn_controller("keeper", Echo))
            inner = this_host().spawn_procs({"gpus": 1}, name="inner").spawn("inner", Inner)
            new = inner.ask.call_one(echo).get(timeout=60)
            with open(path + ".new", "w") as file:
                print(*old, *new, file=file)
            os.rename(path + ".new", path)

        threading.Thread(target=run, daemon=True).start()

if __name__ == "__main__":
    mesh = keep("gone", 60)
    try:
        outer = mesh.hosts.spawn_procs({"gpus": 1}).spawn("outer", Outer)
        outer.later.call_one("outcomes", this_proc().spawn("echo", Echo)).get()
        shutdown_context().get(20)
        until = time.monotonic() + 90
        while not os.path.exists("outcomes") and time.monotonic() < until:
            time.sleep(0.05)
        print(open("outcomes").read().strip())
    finally:
        end("gone")
    shutdown_context().get(20)
"""
CHANNEL = """
if __name__ == "__main__":
    from monarch._actors.ports import Channel

    this_host().spawn_procs({"gpus": 1}).initialized.get()
    _, receiver = Channel.open()
    pending = receiver.recv()
    shutdown_context().get(20)
    print(outcome(lambda: pending), outcome(receiver.recv))
"""
CASES = {
    "a detached mesh that the program has left": (LEFT, "StoppedError StoppedError"),
    "a process of a host whose agent has died": (AGENT_DEAD, "SupervisionError"),
    "the former program of a detached mesh": (PROGRAM_GONE, " ".join(["SupervisionError"] * 4)),
    "a channel after the end of its session": (CHANNEL, "StoppedError StoppedError"),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
def test_call_fails(program: Callable[..., Any], case: str) -> None:
    text, said = CASES[case]
    assert program(HEAD + text, timeout=150).ok().split() == said.split()
