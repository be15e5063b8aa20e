"""User code that interrupts this package in the same thread, and sends: ``__del__`` and signal handlers."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._node.current import current_node
from monarch._notebook.showing import streams
from monarch._notebook.showing.display import ShownObject
from monarch._session.session import need_session
from monarch.actor import Actor, endpoint
from monarch_kernel.output.displays import Displays

STORM = """import faulthandler, gc, signal, sys
import numpy
from monarch.actor import Actor, endpoint, this_host, shutdown_context
faulthandler.dump_traceback_later(90, exit=True)

class Sink(Actor):
    def __init__(self): self.got = []; self.count = 0
    @endpoint
    def note(self, number): self.got.append(number)
    @endpoint
    def add(self, data): self.count += 1; return self.count
    @endpoint
    def notes(self): return self.got

sent = 0
busy = False
def send(*_):
    global sent, busy
    if busy: return
    busy = True
    try:
        sink.note.broadcast(sent)
        sent += 1
    finally: busy = False

class Drop:
    def __init__(self): self.me = self
    def __del__(self):
        send()

def main(how, rounds):
    global sink
    procs = this_host().spawn_procs({"gpus": 1})
    sink = procs.spawn("sink", Sink)
    sink.notes.call_one().get()
    big = numpy.zeros(4000)
    if how == "signal":
        signal.signal(signal.SIGALRM, send)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    else:
        gc.set_threshold(7, 1, 1)
    for i in range(rounds):
        if how == "gc":
            for _ in range(3): Drop()
        f = [sink.add.call_one(big), sink.add.call_one(i)]
        assert [x.get(timeout=20) for x in f] == [2*i+1, 2*i+2], i
    signal.setitimer(signal.ITIMER_REAL, 0); gc.set_threshold(700,10,10)
    global busy
    busy = True
    got = sink.notes.call_one().get(timeout=20)
    assert got == list(range(sent)), (len(got), sent)
    print("ok")
    shutdown_context().get(timeout=20)
if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["signal", "gc"])
def test_messages_sent_during_a_send_arrive_in_order(tmp_path: Path, how: str) -> None:
    """Thousands of messages of a handler, or of ``__del__`` methods, interrupt calls at every step."""
    path = tmp_path / "program.py"
    path.write_text(STORM)
    done = subprocess.run([sys.executable, str(path), how, "1000"], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def show(self, port: Any) -> None:
        port.send(ShownObject("show", {"text/plain": Asks(self.me)}))

    def __init__(self) -> None:
        self.me = None

    @endpoint
    def know(self, me: Any) -> None:
        self.me = me


class Asks(str):
    """A text whose unpickling calls an actor."""

    actor: Any

    def __new__(cls, actor: Any) -> Asks:
        self = super().__new__(cls, "not asked")
        self.actor = actor
        return self

    def __reduce__(self) -> Any:
        return _asked, (self.actor,)


def _asked(actor: Any) -> str:
    return f"answer {actor.echo.call_one(3).get(timeout=20)}"


def test_unpickling_a_displayed_value_may_wait(procs: Any) -> None:
    echo = procs(1).spawn("echo", Echo)
    echo.know.call(procs(1).spawn("other", Echo)).get(timeout=20)
    shown: list[Any] = []
    shell = SimpleNamespace(display_pub=SimpleNamespace(publish=shown.append))
    streams = SimpleNamespace(output=need_session(current_node()).output, open_page=lambda parent: None)
    displays = Displays(shell, 1, 1, False, streams)
    try:
        echo.show.call(displays.port).get(timeout=20)
    finally:
        displays.close()
    assert [bundle["text/plain"] for bundle in shown] == ["[rank 0] answer 3"]


class Prints(Actor):
    """Prints in a thread of an ended call, while the program takes no output."""

    @endpoint
    def begin(self) -> None:
        streams.install()
        self.go = threading.Event()
        threading.Thread(target=self._print, name="prints", daemon=True).start()

    def _print(self) -> None:
        self.go.wait(20)
        print("late")

    @endpoint
    def locked(self) -> bool:
        """Return whether that thread holds the lock of the streams while it waits for the program."""
        from monarch._node.current import current_node

        node = current_node()
        idle, waits, over = node.output.idle, threading.Event(), threading.Event()

        def wait() -> None:
            waits.set()
            over.wait(20)
            idle()

        node.output.idle = wait
        self.go.set()
        waits.wait(20)
        node.output.idle = idle
        free = streams._lock.acquire(timeout=2)
        if free:
            streams._lock.release()
        over.set()
        return not free


def test_print_does_not_wait_for_a_blocked_print(procs: Any) -> None:
    prints = procs(1).spawn("prints", Prints)
    prints.begin.call().get(timeout=20)
    assert prints.locked.call_one().get(timeout=30) is False
