"""The buffer server by itself: hostile peers, and a process without descriptors."""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from leaks import wait_until
from monarch._tensors.memory.registry import Registry
from monarch._tensors.memory.views import memory_of
from monarch._tensors.transports import stream_server
from monarch._tensors.transports.base import Move
from monarch._tensors.transports.stream import StreamTransport
from monarch._tensors.transports.stream_protocol import BOUNDS, NONCE, READ, REQUEST, proof
from monarch._tensors.transports.stream_server import STRANGERS, StreamServer

SECRET = b"secret"


class Served:
    """A server with one buffer, and its clients."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.data = torch.arange(10.0)
        self.remote = self.registry.add(memory_of(self.data, "it"), "host/owner", "the owner")
        self.server = StreamServer(self.registry, SECRET, "127.0.0.1")

    def read(self) -> None:
        """Reads the buffer as a process of the session does."""
        target = memory_of(torch.zeros(10), "there")
        friend = StreamTransport(SECRET, lambda remote, timeout: self.server.address)
        friend.move([Move(self.remote, target)], False, 20.0)
        assert target.keep.tolist() == self.data.tolist()
        friend.close()

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.server.address, 20)

    def member(self) -> socket.socket:
        """A connection that has proved the secret."""
        connection = self.stranger()
        theirs, mine = connection.recv(NONCE, socket.MSG_WAITALL), secrets.token_bytes(NONCE)
        connection.sendall(mine + proof(SECRET, b"client", theirs, mine))
        assert len(connection.recv(32, socket.MSG_WAITALL)) == 32
        return connection


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()


def test_handshake_has_one_deadline_however_slow_bytes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_server, "HANDSHAKE_SECONDS", 0.5)
    with served.stranger() as stranger:
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begun < 20:
                stranger.sendall(b"x")
                time.sleep(0.05)
    assert time.monotonic() - begun < 10
    served.read()


def test_strangers_are_limited_and_members_served(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_server, "HANDSHAKE_SECONDS", 60.0)
    before = sum(thread.name == "monarch-stream" for thread in threading.enumerate())
    strangers = [served.stranger() for _ in range(STRANGERS + 20)]
    closed = [each for each in strangers[STRANGERS:] if each.recv(1) == b""]
    assert len(closed) == 20 and served.server._strangers == STRANGERS
    assert sum(thread.name == "monarch-stream" for thread in threading.enumerate()) == before + STRANGERS
    for each in strangers:
        each.close()
    assert wait_until(lambda: served.server._strangers == 0)
    served.read()


@pytest.mark.parametrize("spans", [(2**63 - 1, 2), (-1, 1), (0, 41), (40, 1), (2**62, 2**62)])
def test_spans_out_of_bounds_are_refused(served: Served, spans: tuple[int, int]) -> None:
    with served.member() as member:
        member.sendall(REQUEST.pack(READ, served.remote.key, 1) + struct.pack("<qq", *spans))
        assert member.recv(1) == bytes([BOUNDS])


def test_garbage_of_members_is_reported_seldom(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(7)
    for _ in range(300):
        with served.member() as member:
            member.sendall(draw.randbytes(draw.randrange(1, 200)))
    with served.member() as member:
        member.sendall(REQUEST.pack(READ, served.remote.key, 0))
        assert member.recv(1) == b""
    served.read()
    assert len(capfd.readouterr().err.splitlines()) < 10


FULL = """
import os, resource, sys
from tensors.test_stream_server import Served
served = Served()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
print(*served.server.address, flush=True)
sys.stdin.readline()
for fd in held:
    os.close(fd)
print("free", flush=True)
sys.stdin.readline()
served.server.close()
"""


@pytest.mark.slow
def test_accept_resumes_after_descriptor_shortage(tmp_path: Any) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FULL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with process:
        host, port = process.stdout.readline().split()
        with socket.create_connection((host, int(port)), 20) as waiting:
            # It cannot accept this one yet, and reports that.
            assert "cannot accept connections: Too many open files" in process.stderr.readline()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "free\n"
            assert len(waiting.recv(NONCE, socket.MSG_WAITALL)) == NONCE
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
