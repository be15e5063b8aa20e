"""Which sockets of a process belong to a collective, and which interface collectives use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

# torch exports these without __all__.
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from leaks import wait_until
from monarch._tensors.collectives import interfaces
from monarch._tensors.collectives.connections import answer_listening, connected_to, open_sockets, shut_down
from monarch._tensors.collectives.interfaces import choose_interface, interface_of


def test_only_connections_of_tcp_are_shut_down() -> None:
    before = open_sockets()
    near, far = socket.socketpair()
    with (
        near,
        far,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as a,
    ):
        b = server.accept()[0]
        with b:
            assert len(open_sockets() - before) == 5
            assert shut_down(open_sockets() - before) == 2
            assert a.recv(1) == b.recv(1) == b""
            near.send(b"1")
            assert far.recv(1) == b"1"


def test_writes_fail_later_than_reads_end() -> None:
    """A thread of gloo that cannot write would not wake the thread that waits for it."""
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b = server.accept()[0]
        near = {each for each in open_sockets() - before if each[0] == a.fileno()}
        with b:
            with a:
                assert shut_down(near) == 1 and shut_down(near) == 0
                assert a.recv(1) == b""
                a.send(b"1")
                b.send(b"1")
                b.send(b"2")
                assert b.recv(1) == b"1"
            # Its descriptor is closed, and the other end does not know yet.
            b.setblocking(False)
            with pytest.raises(BlockingIOError):
                b.recv(1)
            b.settimeout(20)
            with suppress(ConnectionResetError):
                assert b.recv(1) == b""
    assert wait_until(lambda: not open_sockets() - before)


class Shown(Store):
    """A store that tells what is asked of it, and answers once it may."""

    def __init__(self, store: Store, may_answer: bool) -> None:
        super().__init__()
        self._store = store
        self.asked, self.may_answer = threading.Event(), threading.Event()
        if may_answer:
            self.may_answer.set()

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked.set()
        self.may_answer.wait()
        return self._store.multi_get(keys)

    def has_extended_api(self) -> bool:
        return True


@pytest.mark.parametrize("turn", range(6))
def test_thread_that_waits_for_members_to_connect_is_freed(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Which of two members connects to the other is random, so it waits in half of the turns."""
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")
    common = HashStore()
    stores = [Shown(common, True), Shown(common, False)]
    made: list[Any] = []

    def make(rank: int) -> None:
        with suppress(RuntimeError):
            made.append(dist.ProcessGroupGloo(stores[rank], rank, 2, timedelta(minutes=30)))

    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(2)]
    threads[1].start()
    # It has said where it listens, and never comes itself.
    assert stores[1].asked.wait(60)
    before = open_sockets()
    threads[0].start()
    assert stores[0].asked.wait(60)
    answer_listening(open_sockets() - before, 2)
    threads[0].join(60)
    assert not threads[0].is_alive()
    stores[1].may_answer.set()
    threads[1].join(60)
    assert not threads[1].is_alive()


def test_reused_descriptor_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b = server.accept()[0]
        with a, b:
            known = {(number, inode + 1) for number, inode in open_sockets() if number in (a.fileno(), b.fileno())}
            assert shut_down(known) == 0
            a.send(b"1")
            assert b.recv(1) == b"1"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_interface_of_its_addresses(address: str) -> None:
    assert interface_of(address) == "lo"


def test_unknown_address_has_no_interface() -> None:
    assert interface_of("192.0.2.1") == ""
    assert interface_of("no-such-host.invalid") == ""


def test_interface_of_address_is_found_without_names() -> None:
    code = "import sys; from monarch._tensors.collectives.interfaces import interface_of; interface_of('127.0.0.1')"
    code += "; print('encodings.idna' in sys.modules, 'psutil' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("eth1", {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}), ("lo", {"GLOO_SOCKET_IFNAME": "lo"})],
)
def test_nccl_gets_the_exact_name_of_an_interface(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: dict[str, str]
) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # So that the test's changes are undone.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(interfaces, "interface_of", lambda address: name)
    choose_interface("10.0.0.1")
    assert {key: value for key, value in os.environ.items() if key.endswith("_SOCKET_IFNAME")} == expected


def test_connections_to_a_server_are_those_of_its_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as client,
            server.accept()[0],
            socket.create_connection(other.getsockname()),
        ):
            for address in ("127.0.0.1", "localhost"):
                assert [number for number, _ in connected_to(address, port)] == [client.fileno()]
            assert not connected_to("127.0.0.2", port)


WITHOUT_DESCRIPTORS = """
import os, resource, socket, time
from monarch._tensors.collectives import connections
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
served, _ = server.accept()
near, far = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
ended = []
connections.later = lambda seconds, action: ended.append(action)
found = connections.open_sockets()
mine = {each.fileno() for each in (server, client, served, near, far)}
print(sorted(number for number, _ in found) == sorted(mine), connections.shut_down(found))
print(served.recv(1), client.recv(1))
served.send(b"x")
for action in ended:
    action()
try:
    served.send(b"x")
except BrokenPipeError as error:
    print(type(error).__name__)
near.send(b"y")
print(far.recv(1))
os.close(held.pop())
socket.create_connection(server.getsockname())
print("the server listens")
"""


def test_connections_are_cut_without_a_free_descriptor() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["True 2", "b'' b''", "BrokenPipeError", "b'y'", "the server listens"], done
