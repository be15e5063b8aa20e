"""How process groups are created: without name server queries, and with threads on all cores."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leaks import Kit
from monarch._tensors.collectives.name_lookups import no_name_lookups, resolver_state
from monarch.actor import Actor, current_rank, endpoint

MAPPED = "::ffff:192.0.2.1"
"""An address that no hosts file names."""


class NameServer:
    """A name server of the thread that creates it: counts queries, and answers that the name does not exist."""

    def __init__(self) -> None:
        self.queries = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(512)
            if not query:
                return
            self.queries += 1
            # The same identifier and question; an answer; NXDOMAIN.
            self._socket.sendto(query[:2] + b"\x81\x83" + query[4:], client)

    def close(self) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()


@pytest.fixture
def name_server() -> Iterator[NameServer]:
    server = NameServer()
    yield server
    server.close()


def in_new_thread(work: Callable[[], Any]) -> Any:
    """Each thread has its own resolver, so changes here stay here."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def use_server(port: int) -> None:
    """Make this thread's resolver ask a server on the loopback."""
    import ctypes

    state = resolver_state()
    assert state is not None
    # nsaddr_list follows nscount in struct __res_state.
    server = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, socket.inet_aton("127.0.0.1"))
    ctypes.memmove(ctypes.addressof(state) + 20, server, len(server))
    state.server_count = 1


def look_up() -> str:
    return socket.getnameinfo((MAPPED, 80, 0, 0), socket.NI_NUMERICSERV)[0]


@pytest.mark.skipif(resolver_state() is None, reason="needs glibc's resolver")
def test_no_name_server_is_asked_for_numeric_addresses(name_server: NameServer) -> None:
    def work() -> tuple[int, int]:
        use_server(name_server.port)
        with no_name_lookups("127.0.0.1"):
            with pytest.raises(socket.gaierror):
                look_up()
            meanwhile = name_server.queries
        look_up()
        return meanwhile, name_server.queries

    meanwhile, afterwards = in_new_thread(work)
    assert meanwhile == 0
    assert afterwards > 0


@pytest.mark.skipif(resolver_state() is None, reason="needs glibc's resolver")
def test_name_server_is_asked_for_host_names(name_server: NameServer) -> None:
    def work() -> int:
        use_server(name_server.port)
        with no_name_lookups("node-7.cluster"):
            look_up()
        return name_server.queries

    assert in_new_thread(work) > 0


@pytest.mark.skipif(resolver_state() is None, reason="needs glibc's resolver")
def test_store_clients_ask_no_name_server(
    leaks: Kit, name_server: NameServer, capfd: pytest.CaptureFixture[str]
) -> None:
    from monarch._tensors.collectives.store import find_store, serve_store

    def work() -> int:
        use_server(name_server.port)
        store, port = serve_store("127.0.0.1", 2)
        find_store("127.0.0.1", port, 2).set("key", "value")
        assert store.get("key") == b"value"
        return name_server.queries

    assert in_new_thread(work) == 0
    assert "hostname" not in capfd.readouterr().err
    # Torch keeps it for its next store.
    leaks.rebase()


def test_store_client_without_descriptors_fails_at_once() -> None:
    # In a process of its own, since a limit holds for the whole process.
    script = """
import os, resource
from monarch._tensors.collectives import store
server, port = store.serve_store("127.0.0.1", 2)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    os.close(held.pop())
try:
    store.find_store("127.0.0.1", port, 2)
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout == "Too many open files\n", done.stderr


class Trainer(Actor):
    @endpoint
    def make(self, port: int, size: int) -> float:
        import torch
        import torch.distributed as dist

        rank = current_rank().rank
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    @endpoint
    def cores(self) -> tuple[set[int], dict[str, set[int]]]:
        """Those of this thread, and of gloo's threads by name."""
        gloo: dict[str, set[int]] = {}
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm") as file:
                name = file.read().strip()
            if "gloo" in name:
                gloo.setdefault(name, set()).update(os.sched_getaffinity(int(thread)))
        return os.sched_getaffinity(0), gloo


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core there is nothing to share out")
def test_threads_of_user_groups_use_all_cores(procs: Callable[..., Any]) -> None:
    size = 2
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    trainers = procs(size).spawn("trainers", Trainer)
    assert [value for _, value in trainers.make.call(port, size).get(60)] == [2.0] * size
    everywhere = os.sched_getaffinity(0)
    for _, (own, gloo) in trainers.cores.call().get(60):
        assert len(own) < len(everywhere), "the rank's own thread stays on its share"
        assert gloo, "torch has given its threads other names"
        assert all(cores == everywhere for cores in gloo.values())
