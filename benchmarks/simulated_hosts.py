"""One run of the simulation: a real controller, and stand-ins for the agents of many hosts. See simulation.py.

It is started as ``python simulated_hosts.py HOSTS RANKS_PER_HOST ROUNDS``, and prints seconds as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from typing import Any

import zmq

from monarch._core.causes import Exited
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.links import Link, make_context
from monarch._wire.tcp import LEASE_S, over_network

_NOTHING = b"\x80\x05N."
"""A pickled None."""


class StandIn:
    """Stands in for one host agent and its ranks."""

    def __init__(self, host: str, keys: KeyPair, ready: int) -> None:
        self._host = host
        self._keys = keys
        self._places: dict[str, int] = {}
        self._finished = 0
        self._link: Link | None = None
        self._context = make_context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.set(zmq.CURVE_SERVER, 1)
        self._inbox.set(zmq.CURVE_SECRETKEY, keys.secret)
        self._inbox.set(zmq.CURVE_PUBLICKEY, keys.public)
        over_network(self._inbox, LEASE_S)
        self._inbox.bind("tcp://127.0.0.1:*")
        address = self._inbox.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        os.write(ready, f"{host} {address}\n".encode())

    def run(self) -> None:
        """Answer until the controller says Bye."""
        while True:
            frames = self._inbox.recv_multipart()
            message = m.decode(frames[0])
            if isinstance(message, m.Cast):
                self._on_cast(message, m.decode(frames[1]))
            elif isinstance(message, m.Hosts):
                # Host ids have no slash; the controller is in there by its proc id.
                address, public = next(where for name, where in message.hosts.items() if "/" in name)
                hello = m.encode(m.Hello(m.VERSION, f"{self._host}/agent", os.getpid()))
                self._link = Link(self._context, address, hello, self._keys, public.encode())
            elif isinstance(message, m.Spawn):
                self._on_spawn(message)
            elif isinstance(message, m.Stop):
                for proc in message.procs:
                    self._send(m.Dead(proc, Exited(0), True, []))
            elif isinstance(message, m.Bye):
                return

    def _on_spawn(self, spawn: m.Spawn) -> None:
        # Only the port of a config matters.
        port = pickle.loads(spawn.config).port
        for proc, place in zip(spawn.procs, spawn.places, strict=True):
            self._places[proc] = place
            self._send(m.Ready(proc, os.getpid()))
            self._send(m.Reply(proc, port, place, m.RESULT, 0, _NOTHING))

    def _on_cast(self, cast: m.Cast, message: Any) -> None:
        if isinstance(message, m.Call):
            self._finished += 1 + (len(message.body) >> 12)
        if cast.port:
            done = self._finished
            replies = [
                m.encode(m.Reply(proc, cast.port, self._places[proc], m.RESULT, done, _NOTHING)) for proc in cast.procs
            ]
            head = m.encode(m.Batch(f"{self._host}/agent", [1] * len(replies), len(replies)))
            assert self._link is not None
            self._link.send(head, replies)

    def _send(self, message: m.AnyMessage) -> None:
        assert self._link is not None
        self._link.send(m.encode(message))


def fork_stand_ins(count: int, keys: KeyPair) -> tuple[int, list[m.Listening]]:
    """Fork one process for each host from a warm one; return pids and addresses."""
    reader, writer = os.pipe()
    warm = os.fork()
    if warm == 0:
        os.setpgid(0, 0)
        os.close(reader)
        # Warm: with the imports for unpickling a config.
        import monarch._node.rank_config  # noqa: F401

        gc.collect()
        gc.freeze()
        for index in range(count):
            if os.fork() == 0:
                try:
                    StandIn(f"simulated{index}", keys, writer).run()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
        os.close(writer)
        for _ in range(count):
            os.wait()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        found = [lines.readline().split() for _ in range(count)]
    public = keys.public.decode()
    return warm, [m.Listening(f"{host}/agent", address, address, public) for host, address in found]


def main(hosts: int, per_host: int, rounds: int) -> None:
    """Measure and print."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Forked before this process has a thread or a context.
    keys = KeyPair.new()
    warm, listening = fork_stand_ins(hosts, keys)
    try:
        print(json.dumps(_measure(hosts, per_host, rounds, keys, listening)), flush=True)
    finally:
        try:
            os.killpg(warm, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os._exit(0)


def _measure(
    hosts: int, per_host: int, rounds: int, keys: KeyPair, listening: list[m.Listening]
) -> dict[str, list[float]]:
    """Return the seconds of each part, by the names that simulation.py knows."""
    from monarch._meshes.host_mesh import attached
    from monarch._node.current import current_node
    from monarch.actor import Actor, endpoint, this_host

    class Bench(Actor):
        @endpoint
        def echo(self, value: int) -> int:
            return value

    this_host()
    node = current_node()
    begin = time.perf_counter()
    from monarch._session.session import need_session

    need_session(node).attach(listening, keys, "127.0.0.1")
    mesh = attached(tuple(each.src.partition("/")[0] for each in listening), node, lambda: None)
    attach = time.perf_counter() - begin
    begin = time.perf_counter()
    procs = mesh.spawn_procs({"gpus": per_host})
    actors = procs.spawn("bench", Bench)
    actors.echo.call(0).get()
    spawn = time.perf_counter() - begin
    found: dict[str, list[float]] = {"attach": [attach], "spawn": [spawn]}
    for _ in range(rounds):
        begin, cpu = time.perf_counter(), time.process_time()
        future = actors.echo.call(1)
        found.setdefault("send", []).append(time.perf_counter() - begin)
        values = future.get()
        found.setdefault("wall", []).append(time.perf_counter() - begin)
        found.setdefault("cpu", []).append(time.process_time() - cpu)
        assert len(values) == hosts * per_host
        cpu = time.process_time()
        for _ in range(5):
            actors.echo.broadcast(1)
        # Part of the cost comes after the call has returned: another thread encrypts and writes.
        time.sleep(0.02 + hosts / 5000)
        found.setdefault("broadcast", []).append((time.process_time() - cpu) / 5)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
