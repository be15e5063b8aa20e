"""Strangers at a worker's sockets: they hold little of its memory, and only for a while."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._wire.messages import Split, decode
from monarch._wire.split import PIECE, join, split
from monarch.exceptions import ProtocolError
from workers import Workers

GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
"""Of ZMTP 3, as a client's that wants to use CURVE."""
MB = 1 << 20


FRIEND = """
import os, sys
from monarch.actor import Actor, attach_to_workers, endpoint
class Echo(Actor):
    @endpoint
    def back(self, data):
        return data
hosts = attach_to_workers(ca=sys.argv[1], workers=[sys.argv[2]], timeout=60)
data = os.urandom(int(sys.argv[3]))
print(hosts.spawn_procs().spawn("echo", Echo).back.call_one(data).get(60) == data)
"""


@pytest.fixture
def workers(warm: None, leaks: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


def knock(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 20)
    connection.sendall(GREETING)
    answer = b""
    while len(answer) < 64:
        answer += connection.recv(64 - len(answer))
    return connection


def pour(port: int, size: int) -> None:
    """Declare a frame of 4 GiB, and send as much as accepted."""
    with knock(port) as stranger:
        try:
            stranger.sendall(b"\x06" + (4 << 30).to_bytes(8, "big"))
            for _ in range(size // MB):
                stranger.sendall(bytes(MB))
        except OSError:
            # It was turned away.
            pass


@pytest.mark.slow
def test_strangers_hold_little_memory_of_worker(workers: Workers) -> None:
    process, address = workers.start()
    workers.wait(process)
    port = int(address.rpartition(":")[2])
    (agent,) = workers.agents()
    before = most = resident(agent)
    # Some just wait after their greeting, some send an endless frame, and some send noise.
    waiting = [knock(port) for _ in range(50)]
    noise = [knock(port) for _ in range(50)]
    for each in noise:
        each.sendall(b"\x04" + bytes([200]) + os.urandom(100))
    strangers = [threading.Thread(target=pour, args=(port, 400 * MB)) for _ in range(3)]
    for each in strangers:
        each.start()
    while any(each.is_alive() for each in strangers):
        most = max(most, resident(agent))
    assert most - before < 50 * MB
    # They are disconnected, while peers with the key are served.
    done = subprocess.run(
        [sys.executable, "-c", FRIEND, workers.key, address, str(5 * PIECE + 17)], capture_output=True, timeout=100
    )
    assert done.stdout == b"True\n", done.stderr
    for each in waiting:
        each.settimeout(30)
        assert each.recv(100) == b""
    for each in (*waiting, *noise):
        each.close()


# Large frames of peers with the key


def test_small_messages_are_not_split() -> None:
    assert split([b"head"]) is None
    assert split([b"head", b"", bytes(PIECE)]) is None


def test_large_frames_are_split_and_joined() -> None:
    frames = [b"head", os.urandom(3 * PIECE + 1), b"", memoryview(os.urandom(PIECE * 2)), os.urandom(PIECE)]
    pieces = split(frames)
    assert pieces is not None
    head, *rest = pieces
    assert all(len(piece) <= PIECE for piece in pieces)
    message = decode(head)
    assert isinstance(message, Split) and message.parts == [1, 4, 1, 2, 1] and message.frames == len(rest)
    joined = join(message, rest)
    assert [bytes(frame) for frame in joined] == [bytes(frame) for frame in frames]
    # What arrays and tensors are made on is writable.
    assert isinstance(joined[1], bytearray)


@pytest.mark.parametrize("parts", [[], [0, 2], [1], [3], [2, -1, 1]])
def test_mismatching_pieces_are_rejected(parts: list[int]) -> None:
    with pytest.raises(ProtocolError):
        join(Split(parts, 2), [b"a", b"b"])
