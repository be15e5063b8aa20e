"""A receive loop with real sockets and nothing around it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leaks import wait_until
from monarch._wire.links import Inbox, Link, make_context
from monarch._wire.receiving.loop import ReceiveLoop, Turn

GUARD = 20.0
"""Seconds after which something counts as hanging."""


class Box:
    """Something to wait for."""

    def __init__(self) -> None:
        self.done = False
        self.thread: Turn | None = None
        self.by = 0


class Rig:
    """A receive loop, and a way to send to it: a frame is the number of the box that it fills, or ``say <text>``."""

    def __init__(self, folder: Path) -> None:
        self.context = make_context()
        self.boxes: dict[int, Box] = {}
        self.seen: list[bytes] = []
        self.by: list[int] = []
        self.on_frame: Callable[[bytes], None] = lambda _: None
        self.inbox = Inbox(self.context, f"ipc://{folder}/inbox")
        self.receive_loop = ReceiveLoop(self.inbox, self.handle)
        self.receive_loop.start()
        self.link = Link(self.context, f"ipc://{folder}/inbox", b"hello")
        assert wait_until(lambda: self.seen == [b"hello"])
        self.seen.clear()
        self.by.clear()
        self.closed = False

    def handle(self, frame: bytes) -> None:
        self.seen.append(frame)
        self.by.append(threading.get_ident())
        self.on_frame(frame)
        if frame.isdigit():
            self.fill(int(frame))

    def fill(self, number: int) -> None:
        box = self.boxes[number]
        box.by = threading.get_ident()
        box.done = True
        self.receive_loop.notify(box)

    def box(self, number: int) -> Box:
        self.boxes[number] = Box()
        return self.boxes[number]

    def send(self, number: int | str) -> None:
        self.link.send(str(number).encode())

    def close_loop(self) -> None:
        if not self.receive_loop._lead.closing:
            self.receive_loop.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.close_loop()
            self.link.close()
            self.inbox.close()
            self.context.term()


class Background:
    """A thread whose error is the test's."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.value: Any = None

        def run() -> None:
            try:
                self.value = work()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def join(self) -> Any:
        self.thread.join(GUARD)
        assert not self.thread.is_alive(), "hangs"
        if self.error is not None:
            raise self.error
        return self.value


class SilentAlarm:
    """The time that was set, and nothing else."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.set = self.seconds.append

    def watch(self) -> None: ...
    def unwatch(self) -> None: ...
