"""The notebook's own stdout and stderr, over ipykernel's sending thread and a real socket."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from ipykernel.iostream import IOPubThread
from jupyter_client.session import Session

from monarch_kernel.output.notebook_stream import NotebookStream


class FrontEnd:
    """What a front end gets of two streams, and what their thread was given to do."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.bind("inproc://front-end")
        sending = self.context.socket(zmq.PUSH)
        sending.connect("inproc://front-end")
        self.session: Any = Session(key=b"")
        self.thread: Any = IOPubThread(sending, session=self.session)
        self.thread.start()
        self.out = NotebookStream(self.session, self.thread, "stdout", watchfd=False)
        self.err = NotebookStream(self.session, self.thread, "stderr", watchfd=False)
        self.tasks = 0
        wake = self.thread._event_pipe.send

        def counted(*args: Any) -> None:
            self.tasks += 1
            wake(*args)

        self.thread._event_pipe.send = counted

    def texts(self) -> list[str]:
        """Return the text that has arrived, without waiting."""
        found: list[str] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            message = self.session.deserialize(self.session.feed_identities(frames)[1])
            found.append(message["content"].get("text", ""))

    def close(self) -> None:
        self.thread.stop()
        self.thread.close()
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    made = FrontEnd()
    yield made
    made.close()


@pytest.fixture
def busy_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy_threads")
def test_text_is_sent_when_flush_returns(front_end: FrontEnd) -> None:
    for number in range(300):
        front_end.out.write(f"{number}\n")
        front_end.out.flush()
        assert "".join(front_end.texts()) == f"{number}\n"


def test_flush_without_output_asks_nothing_of_the_thread(front_end: FrontEnd) -> None:
    front_end.out.write("once\n")
    front_end.out.flush()
    before = front_end.tasks
    for stream in (front_end.err, front_end.out, front_end.err):
        stream.flush()
    assert front_end.tasks == before
    assert front_end.texts() == ["once\n"]


def test_text_after_a_flush_is_flushed(front_end: FrontEnd) -> None:
    for stream, other in ((front_end.out, front_end.err), (front_end.err, front_end.out)):
        stream.flush()
        stream.write("again\n")
        other.flush()
        stream.flush()
        assert front_end.texts() == ["again\n"]


@pytest.mark.usefixtures("busy_threads")
def test_flush_waits_for_messages_that_are_no_text(front_end: FrontEnd) -> None:
    for number in range(300):
        front_end.out.flush()
        front_end.session.send(front_end.thread, "display_data", {"text": f"figure {number}"})
        front_end.err.flush()
        assert front_end.texts() == [f"figure {number}"]


@pytest.mark.usefixtures("busy_threads")
def test_each_of_many_threads_finds_its_own_text_sent() -> None:
    sent: list[str] = []

    class Recorded(zmq.Socket[Any]):
        def send_multipart(self, frames: Any, *_args: Any, **_named: Any) -> Any:
            sent.append(b"".join(map(bytes, frames)).decode())

    context: zmq.Context[Any] = zmq.Context()
    session: Any = Session(key=b"")
    thread: Any = IOPubThread(Recorded(context, zmq.PUSH), session=session)
    thread.start()
    streams = [NotebookStream(session, thread, name, watchfd=False) for name in ("stdout", "stderr")]
    missed: list[str] = []

    def write(which: int) -> None:
        for number in range(100):
            text = f"<{which}.{number}>"
            streams[which % 2].write(text)
            streams[which % 2].flush()
            if not any(text in message for message in list(sent)):
                missed.append(text)

    writers = [threading.Thread(target=write, args=(which,)) for which in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    thread.stop()
    thread.close()
    context.destroy(0)
    assert missed == []
    assert sum(len(re.findall(r"<\d+\.", message)) for message in sent) == 400
