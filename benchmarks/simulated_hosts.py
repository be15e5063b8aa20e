"""One run of the simulation: a real controller, and stand-ins for the agents of many hosts. See simulation.py.

It is started as ``python simulated_hosts.py HOSTS RANKS_PER_HOST ROUNDS``, and prints seconds as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

import msgspec
import zmq

from monarch._core.causes import Exited
from monarch._core.roster import split_proc
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.spreading import Spreading
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._procs.os.posix import set_pdeathsig
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.links import make_context
from monarch._wire.split import join
from monarch._wire.tcp import over_network

LEASE = 60.0
"""Seconds of silence until a host counts as lost: all of them share the cores."""
PROCESSES = 8
"""Processes that stand in for all hosts."""
TOGETHER = 32
"""Stand-ins with a thread of ZeroMQ of their own."""
_NOTHING = b"\x80\x05N."
"""A pickled None."""


class Timers:
    """Runs functions later, for all stand-ins of a process."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count().__next__

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run a function after some seconds."""
        heappush(self._waiting, (time.monotonic() + seconds, self._number(), action))

    def run(self) -> float:
        """Run what is due, and return the seconds until the next."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            heappop(self._waiting)[2]()
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else 1.0


class StandIn:
    """Stands in for one host agent and its ranks."""

    def __init__(self, host: str, keys: KeyPair, context: zmq.Context[Any], folder: str, timers: Timers) -> None:
        self._host = host
        self._keys = keys
        self._places: dict[str, int] = {}
        self._finished = 0
        self.ended = False
        self._owner = ""
        self.inbox = context.socket(zmq.PULL)
        self.inbox.set_hwm(0)
        self.inbox.set(zmq.CURVE_SERVER, 1)
        self.inbox.set(zmq.CURVE_SECRETKEY, keys.secret)
        self.inbox.set(zmq.CURVE_PUBLICKEY, keys.public)
        over_network(self.inbox, LEASE)
        self.inbox.bind("tcp://127.0.0.1:*")
        address = self.inbox.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        own = os.path.join(folder, host)
        os.mkdir(own)
        self._router = Router(context, f"{host}/agent", own, keys, LEASE)
        self._uplink = AgentUplink(self._router, timers.later)
        self._spreading = Spreading(
            self._router, self._uplink, timers.later, self._handle, self._failed, lambda _: None
        )
        self.where = f"{host} {address}\n"

    def _failed(self, frames: list[Any], error: Exception) -> None:
        raise error

    def turn(self) -> None:
        """Handle a message."""
        self._handle(list(self.inbox.recv_multipart()))
        for monitor in self._router.idle():
            monitor.close(0)

    def _handle(self, frames: list[Any]) -> None:
        message, more = m.decode(frames[0]), frames[1:]
        if isinstance(message, m.Cast):
            self._on_cast(message, m.decode(more[0]))
        elif isinstance(message, m.Ordered):
            self._spreading.on_ordered(message, more)
        elif isinstance(message, m.Spread):
            self._spreading.on_spread(message, more)
        elif isinstance(message, m.Answers):
            self._spreading.on_answers(message, more)
        elif isinstance(message, m.Uplink):
            self._uplink.on_uplink(message)
        elif isinstance(message, m.Upward):
            self._uplink.on_upward(message, more)
        elif isinstance(message, m.Taken):
            self._uplink.on_taken(message, more)
        elif isinstance(message, m.Down):
            self._router.post(f"{message.host}/agent", more)
        elif isinstance(message, m.Route):
            asked = m.decode(more[0])
            if message.dst == self._router.proc:
                self._handle(more)
            elif isinstance(asked, m.Ask) and asked.port:
                self._send(m.Reply(message.dst, asked.port, m.NOWHERE, m.RESULT, 0, _NOTHING))
            else:
                self._handle(more)
        elif isinstance(message, m.Split):
            self._handle(join(message, more))
        elif isinstance(message, m.Hosts):
            self._router.learn(message)
            # Host ids have no slash; the controller is in there by its proc id.
            self._owner = next(name for name in message.hosts if "/" in name)
            self._router.watched_by = self._owner
        elif isinstance(message, m.Spawn):
            self._on_spawn(message)
        elif isinstance(message, m.Stop):
            for proc in message.procs:
                self._send(m.Dead(proc, Exited(0), True, []))
        elif isinstance(message, m.Bye):
            self.ended = True

    def _on_spawn(self, spawn: m.Spawn) -> None:
        # Only the port of a config matters.
        port = pickle.loads(spawn.config).port
        for proc, place in zip(spawn.procs, spawn.places, strict=True):
            self._places[proc] = place
            self._send(m.Ready(proc, os.getpid()))
            self._send(m.Reply(proc, port, place, m.RESULT, 0, _NOTHING))

    def _on_cast(self, cast: m.Cast, message: Any) -> None:
        if isinstance(message, m.Spawn):
            places = [split_proc(proc)[1] for proc in cast.procs]
            self._on_spawn(msgspec.structs.replace(message, procs=cast.procs, places=places))
            return
        if isinstance(message, m.Call):
            self._finished += 1 + (len(message.body) >> 12)
        if cast.port:
            done = self._finished
            replies = [
                m.encode(m.Reply(proc, cast.port, self._places.get(proc, m.NOWHERE), m.RESULT, done, _NOTHING))
                for proc in cast.procs
            ]
            head = m.encode(m.Batch(f"{self._host}/agent", [1] * len(replies), len(replies)))
            self._spreading.answer(cast.src, cast.port, [head, *replies], True)

    def _send(self, message: m.AnyMessage) -> None:
        self._router.send(self._owner, [m.encode(message)])


def serve(hosts: Sequence[str], keys: KeyPair, ready: int) -> None:
    """Stand in for some hosts until the controller says Bye to all."""
    timers = Timers()
    folder = tempfile.mkdtemp(prefix="simulated")
    # A thread of ZeroMQ for some of them: its work for heartbeats grows with the square of its connections.
    contexts = [make_context() for _ in range(0, len(hosts), TOGETHER)]
    stand_ins = [StandIn(host, keys, contexts[place // TOGETHER], folder, timers) for place, host in enumerate(hosts)]
    shutil.rmtree(folder)
    by_socket = {each.inbox: each for each in stand_ins}
    poller = zmq.Poller()
    for each in stand_ins:
        poller.register(each.inbox, zmq.POLLIN)
        os.write(ready, each.where.encode())
    while not all(each.ended for each in stand_ins):
        for inbox, _ in poller.poll(int(timers.run() * 1000) + 1):
            by_socket[inbox].turn()


def fork_stand_ins(hosts: int, keys: KeyPair) -> tuple[int, list[m.Listening]]:
    """Fork the processes of all hosts from a warm one; return its pid and addresses."""
    reader, writer = os.pipe()
    warm = os.fork()
    if warm == 0:
        os.setpgid(0, 0)
        # None outlives the run, however that ends.
        set_pdeathsig(signal.SIGKILL)
        os.close(reader)
        # Warm: with the imports for unpickling a config.
        import monarch._node.rank_config  # noqa: F401

        gc.collect()
        gc.freeze()
        processes = min(hosts, PROCESSES)
        for index in range(processes):
            if os.fork() == 0:
                try:
                    set_pdeathsig(signal.SIGKILL)
                    serve([f"simulated{host}" for host in range(index, hosts, processes)], keys, writer)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
        os.close(writer)
        for _ in range(processes):
            os.wait()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        found = [lines.readline().split() for _ in range(hosts)]
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
    except BaseException:
        traceback.print_exc()
        raise
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
    node.hosts.lease = LEASE
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
    # Until messages go from host to host.
    time.sleep(2.0)
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
