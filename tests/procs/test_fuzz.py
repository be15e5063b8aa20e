"""Garbage on the control plane, also from peers with the key: nothing dies or hangs, and memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from fuzz import Fuzz
from leaks import wait_until
from light import LIGHT
from monarch._node.remote_errors import unpack_failure
from monarch._procs.agent.routes.router import Router
from monarch._wire import descriptors
from monarch._wire import messages as m
from monarch._wire.descriptors import used_by
from monarch._wire.keys import KeyPair
from monarch._wire.links import make_context
from monarch._wire.split import join
from monarch.exceptions import ProtocolError


def decoded(frame: bytes) -> Any:
    """Return the message of a frame, or None: no other outcome is allowed."""
    try:
        return m.decode(frame)
    except ProtocolError as error:
        assert f"invalid control message of {len(frame)} bytes" in str(error)
        return None


@given(st.binary(max_size=200))
def test_any_bytes_are_message_or_protocol_error(frame: bytes) -> None:
    decoded(frame)
    assert unpack_failure(frame).kind


@given(st.integers(0, 1 << 32))
def test_broken_messages_are_messages_or_protocol_errors(seed: int) -> None:
    fuzz = Fuzz(seed, ["h/p.0"])
    for frames in fuzz.many(30):
        head, *rest = frames
        message = decoded(head)
        if isinstance(message, m.Split):
            # Few of them are valid; the others are rejected, and nothing else.
            with suppress(ProtocolError):
                assert len(join(message, rest)) == len(message.parts)


@given(st.integers(0, 1 << 32))
def test_random_messages_round_trip(seed: int) -> None:
    message = Fuzz(seed, ["h/p.0"]).message()
    again = m.decode(m.encode(message))
    assert type(again) is type(message) and m.encode(again) == m.encode(message)


@pytest.mark.parametrize(
    "frame",
    [m.encode(m.Watch("a", "b")).replace(b"\xa1a", b"\xa1\xff"), b"\x93\x0b\xa1x" + b"\x91" * 100_000, b"\xdd" * 5],
    ids=["text that is not UTF-8", "nested without end", "a list of 3,722,304,989 values"],
)
def test_frame_that_cannot_be_decoded_is_protocol_error(frame: bytes) -> None:
    assert decoded(frame) is None and unpack_failure(frame[2:]).kind == "ProtocolError"


def test_listen_at_invalid_address_leaves_no_socket(tmp_path: Path) -> None:
    context, owner = make_context(), KeyPair.new()
    router = Router(context, "h/agent", str(tmp_path), KeyPair.new(), 5.0)
    try:
        opened: list[int] = []
        for _ in range(6):
            with pytest.raises(zmq.ZMQError):
                router.listen("tcp://nowhere at all", owner.public, [])
            opened.append(used_by())
        # Sockets are closed by another thread.
        assert wait_until(lambda: used_by() <= opened[0]), opened
        assert router.listen("tcp://127.0.0.1", owner.public, []).owner_address.startswith("tcp://127.0.0.1:")
    finally:
        router.close()
        context.destroy(0)
        descriptors.reserve.give_up()


TESTS = str(Path(__file__).parent.parent)
LIVE = """
import os, socket, sys
from fuzz import Fuzz
from monarch._node.current import current_node
from monarch._session.session import need_session
from monarch._procs.session_folder import ipc_address
from monarch._wire import messages as m
from monarch._wire.links import Link
from monarch.actor import Actor, endpoint, this_host
class A(Actor):
    @endpoint
    def pid(self):
        return os.getpid()
def resident(pid):
    return int(open(f"/proc/{pid}/statm").read().split()[1]) * 4096
procs = this_host().spawn_procs({"gpus": 2})
actors = procs.spawn("a", A)
pids = list(actors.pid.call().get(60).values())
node = current_node()
rank = actors._members_at().peers[0].proc
target, seed = sys.argv[1], int(sys.argv[2])
pid = {"rank": pids[0], "agent": need_session(node).agent_pid, "controller": os.getpid()}[target]
proc = {"rank": rank, "agent": node.agent, "controller": node.proc}[target]
before, opened = resident(pid), len(os.listdir(f"/proc/{pid}/fd"))
address = ipc_address(node.folder, proc)
if seed:
    # What rightly ends its receiver, or says that others have ended, is left out.
    fuzz = Fuzz(seed, [], (m.Bye, m.Signal, m.Stop, m.Dead, m.Halt, m.Hello, m.Refused, m.Hosts))
    link = Link(node.hosts.context, address, node.hosts.hello)
    for frames in fuzz.many(2000):
        link.send(frames[0], frames[1:])
    link.close(10_000)
else:
    greeting = b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL" + bytes(48)
    odd = [b"", greeting[:5], greeting, greeting + b"\\x06" + b"\\x7f" * 8, greeting + b"\\x04\\x05\\xffREADY"]
    for data in [*odd, *Fuzz(1, []).noise(300)]:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("ipc://"))
        connection.send(data)
        connection.close()
alive = list(actors.pid.call().get(40).values()) == pids
more, opened = resident(pid) - before, len(os.listdir(f"/proc/{pid}/fd")) - opened
fresh = len(this_host().spawn_procs({"gpus": 2}).spawn("b", A).pid.call().get(40))
# What ranks are said to have printed comes on stdout too.
open("result", "w").write(f"{alive} {more >> 20} {opened} {fresh}")
"""


def survived(done: Any, folder: Path) -> None:
    """Each process lives, answers, and has neither much memory nor many files more than before."""
    done.ok()
    alive, megabytes, files, fresh = (folder / "result").read_text().split()
    assert (alive, fresh) == ("True", "2") and int(megabytes) < 64 and int(files) < 100


TARGETS = pytest.mark.parametrize("target", ["controller", "agent", "rank"])


@pytest.mark.slow
@TARGETS
def test_garbage_of_holders_of_key_ends_nobody(program: Callable[..., Any], target: str, tmp_path: Path) -> None:
    done = program(LIGHT + LIVE, target, "7", PYTHONPATH=TESTS)
    survived(done, tmp_path)
    assert "undecodable frame was dropped: ProtocolError: invalid control message of" in done.err


@pytest.mark.slow
@TARGETS
def test_noise_on_ipc_socket_ends_nobody(program: Callable[..., Any], target: str, tmp_path: Path) -> None:
    survived(program(LIGHT + LIVE, target, "0", PYTHONPATH=TESTS), tmp_path)
