"""The notebook's own stdout and stderr, over ipykernel's sending thread and a real socket."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from ipykernel.iostream import IOPubThread
from jupyter_client.session import Session

from kernels import Notebook
from monarch_kernel.output.notebook_stream import NotebookStream


class FrontEnd:
    """The receiving end of two streams, and the number of tasks that this thread has scheduled."""

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
        # The pipe of this thread only.
        wake = self.thread._event_pipe.send

        def counted(*args: Any) -> None:
            self.tasks += 1
            wake(*args)

        self.thread._event_pipe.send = counted

    def texts(self) -> list[str]:
        """Return the text that has arrived, without waiting."""
        texts: list[str] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return texts
            message = self.session.deserialize(self.session.feed_identities(frames)[1])
            texts.append(message["content"].get("text", ""))

    def close(self) -> None:
        self.thread.stop()
        self.thread.close()
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    front_end = FrontEnd()
    yield front_end
    front_end.close()


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
    assert before
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


def test_flush_waits_for_text_that_is_being_sent(front_end: FrontEnd) -> None:
    """ipykernel's timer has emptied the buffer, and the message of the text is not made yet."""
    front_end.out.write("late\n")
    front_end.err.write("other\n")
    front_end.err.flush()
    assert front_end.texts() == ["other\n"]
    making, goes_on, message = threading.Event(), threading.Event(), front_end.session.msg

    def slow(*args: Any, **named: Any) -> Any:
        making.set()
        assert goes_on.wait(30)
        return message(*args, **named)

    front_end.session.msg = slow
    assert making.wait(30)
    seen: list[list[str]] = []
    flushing = threading.Thread(target=lambda: (front_end.out.flush(), seen.append(front_end.texts())))
    flushing.start()
    flushing.join(0.2)
    assert flushing.is_alive() and not seen
    goes_on.set()
    flushing.join(30)
    assert seen == [["late\n"]]


def test_flush_without_the_io_thread_sends_by_itself(front_end: FrontEnd) -> None:
    front_end.out.write("before\n")
    front_end.thread.stop()
    front_end.out.write("after\n")
    front_end.out.flush()
    assert "".join(front_end.texts()) == "before\nafter\n"


def test_flush_that_takes_too_long_is_told(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", told)
    goes_on = threading.Event()
    front_end.thread.schedule(lambda: goes_on.wait(30))
    stream: Any = front_end.out
    stream.flush_timeout = 0.05
    front_end.out.write("text\n")
    front_end.out.flush()
    assert told.getvalue() == "the notebook's stdout was not sent within 0.05 s\n"
    goes_on.set()
    stream.flush_timeout = 30
    front_end.out.flush()
    assert front_end.texts() == ["text\n"]


@pytest.mark.slow
def test_kernel_has_these_streams_and_makes_no_unwritten_records(notebook: Notebook) -> None:
    assert notebook.run("import sys\ntype(sys.stdout).__name__").ok().shown == "'NotebookStream'"
    cell = notebook.run(
        "log = get_ipython().kernel.log\nlog.isEnabledFor(10), any(h.level <= 10 for h in log.handlers)"
    ).ok()
    assert cell.shown == "(False, False)"


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
