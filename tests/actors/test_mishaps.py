"""Errors in handling a message reach its sender or, if no caller waits, the program, at most rarely."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from leaks import wait_until
from monarch._core.causes import Stopped
from monarch._core.shapes.region import Region
from monarch._node.current import current_node
from monarch._node.liveness import here
from monarch._node.remote_errors import pack_failure
from monarch._node.replies.gather import Gather
from monarch._node.services.answering import on_ask
from monarch._node.services.asking import ask_proc
from monarch._node.services.lanes import Lanes
from monarch._procs.session_folder import ipc_address
from monarch._wire import messages as m
from monarch._wire.links import Link
from monarch._wire.pickling import dumps
from monarch._wire.receiving.aside import flush, tell
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, MonarchError, PointError, ProtocolError

NOTHING = dumps(((), {}))[0]


class Echo(Actor):
    @endpoint
    def say(self, value: Any = None) -> Any:
        return value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def break_handler(self, kind: str) -> None:
        def broken(message: Any, more: Any) -> None:
            raise LookupError("broken on purpose")

        current_node().dispatch.handlers[getattr(m, kind)] = broken


@pytest.fixture
def echo(procs: Any) -> Any:
    mesh = procs(1).spawn("echo", Echo).slice(gpus=0)
    mesh.pid.call_one().get(timeout=20)
    return mesh


@pytest.fixture
def shown(host: Any, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """The printed lines about errors of handlers; the counts start at zero."""
    mishaps = current_node().mishaps
    lines: list[str] = []

    def read() -> list[str]:
        lines.extend(line for line in capfd.readouterr().err.splitlines() if line.startswith("monarch: internal error"))
        return lines

    mishaps.forget()
    yield read
    mishaps.forget()


def waiting(mesh: Any, method: str = "say") -> Gather[Any]:
    """Return a Gather for a message that has not been sent yet."""
    peers = mesh._members_at().peers
    return Gather(current_node(), peers, mesh.extent, "echo", method, lambda _, values: values, mesh._key)


@pytest.mark.parametrize("kind", ["Call", "Create", "Halt", "Ask"])
def test_a_handler_that_raises_answers_the_caller(echo: Any, kind: str) -> None:
    node, peer = current_node(), echo._members_at().peers[0]
    pid = echo.pid.call_one().get(timeout=20)
    echo.break_handler.call_one(kind).get(timeout=20)
    answers = waiting(echo, "it")
    view = echo._view_bytes
    message = {
        "Call": m.Call(node.proc, echo._key, "say", answers.port, view, "", 0, NOTHING),
        "Create": m.Create(node.proc, "new", answers.port, view, b""),
        "Halt": m.Halt(node.proc, echo._key, answers.port, view, "test"),
        "Ask": m.Ask(node.proc, answers.port, view, "liveness.here", dumps(())[0]),
    }[kind]
    assert peer.window.take(1)
    peer.send(m.encode(message))
    with pytest.raises(ActorError, match="LookupError: broken on purpose"):
        answers.get(timeout=20)
    if kind == "Call":
        assert peer.window.behind == 0, "the cost of a call that was not handled is not given back"
    # It could not be stopped in the usual way.
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: peer.dead is not None)


def test_malformed_view_fails_at_the_caller(echo: Any) -> None:
    answers = waiting(echo)
    echo._members_at().peers[0].send(
        m.encode(m.Call(current_node().proc, echo._key, "say", answers.port, b"\x00", "", 0, NOTHING, None, 0, 0))
    )
    with pytest.raises(MonarchError, match="expected labels, offset, sizes and strides"):
        answers.get(timeout=20)
    assert echo.say.call_one(3).get(timeout=20) == 3


def test_a_rank_outside_the_view_answers_with_an_error(procs: Any) -> None:
    mesh = procs(3).spawn("echo", Echo)
    one, node = mesh.slice(gpus=2), current_node()
    answers = waiting(one)
    view = m.pack(Region(("gpus",), 0, (2,), (1,)).pack())
    call = m.Call(node.proc, mesh._key, "say", answers.port, view, "", 0, NOTHING, None, 0, 0)
    one._members_at().peers[0].send(m.encode(call))
    with pytest.raises(PointError, match=r"echo\[gpus=2\] received a message that was not sent to rank 2"):
        answers.get(timeout=20)
    halted = waiting(one, "stop")
    one._members_at().peers[0].send(m.encode(m.Halt(node.proc, "none", halted.port, view, "test")))
    with pytest.raises(PointError, match=r"rank 2 of procs.* received a message that was sent to other ranks"):
        halted.get(timeout=20)


@pytest.mark.parametrize("rank", [-1, -7, 2, 99])
def test_answer_from_unknown_position_raises(procs: Any, rank: int) -> None:
    mesh, node = procs(2).spawn("echo", Echo), current_node()
    one, two = mesh._members_at().peers
    answers = waiting(mesh)
    node.dispatch.deliver(m.encode(m.Reply(one.proc, answers.port, 0, m.RESULT, 0, dumps("fine")[0])))
    node.dispatch.deliver(m.encode(m.Reply(two.proc, answers.port, rank, m.RESULT, 0, dumps("lost")[0])))
    with pytest.raises(ProtocolError, match=f"answered echo.say.* from position {rank}; the call was sent to 2 ranks"):
        answers.get(timeout=20)
    # A second answer from one position changes nothing.
    again = waiting(mesh)
    for place, text in ((0, "first"), (0, "second"), (1, "third")):
        node.dispatch.deliver(m.encode(m.Reply(one.proc, again.port, place, m.RESULT, 0, dumps(text)[0])))
    assert again.get(timeout=20) == ["first", "third"]


def test_answer_from_a_stranger_is_counted(echo: Any, shown: Callable[[], list[str]]) -> None:
    node, answers = current_node(), waiting(echo)
    node.dispatch.deliver(m.encode(m.Reply("h/stranger.0", answers.port, 5, m.RESULT, 0, NOTHING)))
    wanted = ("h/stranger.0 answered echo", "is not one of them")
    assert wait_until(lambda: any(all(word in line for word in wanted) for line in shown()))
    assert node.mishaps.statistics() and not answers.done
    answers.lost(echo._members_at().peers[0], m.Dead("x", Stopped(), True, []))


@pytest.mark.parametrize("body", [b"", b"garbage", b"\x93\x01\x02\x03"])
def test_an_error_that_cannot_be_read_is_a_protocol_error(echo: Any, body: bytes) -> None:
    node, answers = current_node(), waiting(echo)
    node.dispatch.deliver(m.encode(m.Reply(echo._members_at().peers[0].proc, answers.port, 0, m.ERROR, 0, body)))
    with pytest.raises(ProtocolError, match=f"an error arrived as {len(body)} bytes that are not a failure"):
        answers.get(timeout=20)


def test_undecodable_frames_are_reported_rarely(echo: Any, shown: Callable[[], list[str]]) -> None:
    node, peer = current_node(), echo._members_at().peers[0]
    for proc in (peer.proc, node.proc):
        link = Link(node.hosts.context, ipc_address(node.folder, proc), node.hosts.hello)
        for number in range(5_000):
            link.send(b"garbage", [b"more"] * (number % 3))
        # One that says that more frames follow than do, and kinds that neither takes.
        link.send(m.encode(m.Call("h/x", "a", "b", 1, b"", "", 0, b"", None, 3)), [b"one"])
        link.send(m.encode(m.Bye("h/x")))
        link.send(m.encode(m.Batch("h/x", [1, 2], 1)), [b"garbage"])
        link.close(1000)
    assert echo.say.call_one("well").get(timeout=30) == "well"
    # Of the rank once each; the program shows its own at the first, the tenth, the hundredth and the thousandth.
    assert wait_until(lambda: len(shown()) >= 4 + 7, 20), shown()
    lines = shown()
    assert sum("rank 0 of" in line for line in lines) == 4 and sum("this program" in line for line in lines) == 7
    assert sum("1,000 of this kind" in line for line in lines) == 1
    assert sum("this process does not handle Bye" in line for line in lines) == 2
    assert sum("expected a message of 4 frames, got 2" in line for line in lines) == 2
    assert all(len(line) < 800 for line in lines)


def test_unawaited_mishap_is_shown_once(echo: Any, shown: Callable[[], list[str]]) -> None:
    node, peer = current_node(), echo._members_at().peers[0]
    echo.break_handler.call_one("Probe").get(timeout=20)
    for _ in range(5):
        peer.send(m.encode(m.Probe(peer.proc, ())))
        peer.send(m.encode(m.Ask(node.proc, 0, b"", "liveness.nothing", NOTHING)))
    ask_proc(peer.proc, here).get(timeout=20)
    assert wait_until(lambda: len(shown()) >= 2), shown()
    assert echo.say.call_one(1).get(timeout=20) == 1
    assert [line.partition(" of ")[0] for line in shown()] == ["monarch: internal error in rank 0"] * 2
    assert "Probe was dropped: LookupError: broken on purpose (test_mishaps.py:" in shown()[0]
    assert "request for the service 'liveness.nothing' was dropped: ArgumentError" in shown()[1]


@pytest.mark.parametrize("closed", [False, True])
def test_request_that_fails_as_the_session_ends_is_not_told(closed: bool) -> None:
    told: list[Any] = []
    mishaps = SimpleNamespace(failed=lambda ask, error: told.append(error))
    node: Any = SimpleNamespace(closed=closed, lanes=Lanes(), mishaps=mishaps)
    on_ask(node, m.Ask("h/x.0", 0, b"", "liveness.nothing", NOTHING))
    assert wait_until(lambda: node.lanes.is_idle("service-liveness"))
    assert len(told) == (not closed)


def test_malformed_part_of_a_batch_spares_the_others(procs: Any, shown: Callable[[], list[str]]) -> None:
    mesh, node = procs(2).spawn("echo", Echo), current_node()
    answers = waiting(mesh)
    one, two = (
        m.encode(m.Reply(peer.proc, answers.port, place, m.RESULT, 0, dumps(place)[0]))
        for place, peer in enumerate(mesh._members_at().peers)
    )
    batch = m.Batch("h/agent", [1, 2, 1], 4)
    node.dispatch.handlers[m.Batch](batch, [one, b"garbage", b"more", two])
    assert answers.get(timeout=20) == [0, 1]
    # On a busy machine an answer of an earlier test may come late, which is told as well.
    assert wait_until(lambda: sum("undecodable frame" in each for each in shown()) == 1)


def test_malformed_error_of_a_fault_is_shown(echo: Any, capfd: pytest.CaptureFixture[str]) -> None:
    node = current_node()
    node.dispatch.deliver(m.encode(m.Fault("h/x", "nobody", 0, b"garbage")))
    seen: list[str] = []
    assert wait_until(lambda: seen.append(capfd.readouterr().err) or "not a failure of protocol" in "".join(seen))
    assert pack_failure(ValueError())


def test_line_of_an_error_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", Writes())
    tell("a line")
    flush(20)
    # Two writes would let the line of another thread in between.
    assert written[0] == "a line\n"
