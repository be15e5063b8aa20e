"""The physical floor: the limit of anything built on Python, ZeroMQ and fork.

Raw pyzmq ROUTER and DEALER over ipc, with one pickle at each end; workers are forks of a warm process; large data is
a plain copy of memory. No liveness, no errors, no flow control, no order, no threads.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import struct
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import zmq

from systems import base, state, torchrun

_PR_SET_PDEATHSIG = 1


class FloorPool(base.Pool):
    def __init__(self, zygote: Zygote, count: int, torch: bool) -> None:
        self._folder = tempfile.mkdtemp(prefix="floor")
        address = f"ipc://{self._folder}/s"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._names = [b"w%d" % rank for rank in range(count)]
        zygote.fork(count, address)
        for _ in range(count):
            self._socket.recv_multipart()
        self.greet(torch)

    def one(self, method: str, *args: Any) -> Any:
        self._socket.send_multipart([self._names[0], method.encode(), pickle.dumps(args)])
        return pickle.loads(self._socket.recv_multipart()[1])

    def each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Make every worker do the same with its own arguments."""
        for worker, its in zip(self._names, args, strict=True):
            self._socket.send_multipart([worker, method.encode(), pickle.dumps(its)])
        return [pickle.loads(self._socket.recv_multipart()[1]) for _ in self._names]

    def all(self, method: str, *args: Any) -> list[Any]:
        body, name = pickle.dumps(args), method.encode()
        for worker in self._names:
            self._socket.send_multipart([worker, name, body])
        return [pickle.loads(self._socket.recv_multipart()[1]) for _ in self._names]

    def flight_one(self, values: Sequence[Any]) -> None:
        for value in values:
            self._socket.send_multipart([self._names[0], b"echo", pickle.dumps((value,))])
        for _ in values:
            pickle.loads(self._socket.recv_multipart()[1])

    def flight_all(self, values: Sequence[Any]) -> None:
        for value in values:
            body = pickle.dumps((value,))
            for worker in self._names:
                self._socket.send_multipart([worker, b"echo", body])
        for _ in range(len(values) * len(self._names)):
            pickle.loads(self._socket.recv_multipart()[1])

    def close(self) -> None:
        for worker in self._names:
            self._socket.send_multipart([worker, b"", b""])
        # The workers close their connections as they end.
        time.sleep(0.05)
        self._socket.close(100)
        self._context.term()
        os.unlink(f"{self._folder}/s")
        os.rmdir(self._folder)


class FirstSums(base.Task):
    """New workers create a process group by torch's own means, at the same time."""

    def __init__(self, zygote: Zygote, ranks: int) -> None:
        self._zygote, self._ranks = zygote, ranks

    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        pool, port = FloorPool(self._zygote, self._ranks, True), base.free_port()
        totals: list[float] = []
        args = [(port, rank, self._ranks) for rank in range(self._ranks)]
        seconds = base.timed(lambda: totals.extend(pool.each("first_sum", args)))
        pool.close()
        if set(totals) != {self._ranks}:
            raise ValueError(f"wrong sums: {totals}")
        return seconds

    def close(self) -> None:
        """Nothing is kept between the runs."""


class Copies(base.Task):
    """Copy memory, in every worker at the same time."""

    def __init__(self, pool: FloorPool, size: int, ranks: int) -> None:
        self._pool, self._size, self._ranks = pool, size, ranks
        self.run(2)

    def run(self, count: int) -> list[float]:
        if self._ranks == 1:
            return self._pool.one("copy", self._size, count)
        return [base.timed(lambda: self._pool.all("copy", self._size, 1)) for _ in range(count)]

    def close(self) -> None:
        self._pool.close()


class Notices(base.Task):
    """A process is killed; its pidfd reports it."""

    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        pid = os.fork()
        if not pid:
            signal.pause()
            os._exit(0)
        notice = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(notice, select.POLLIN)

        def kill() -> None:
            os.kill(pid, signal.SIGKILL)
            poller.poll()

        seconds = base.timed(kill)
        os.waitpid(pid, 0)
        os.close(notice)
        return seconds


class Forks(base.Task):
    """Start another worker, until it has answered with torch."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        pools: list[FloorPool] = []
        seconds = base.timed(lambda: pools.append(FloorPool(self._zygote, 1, True)))
        pools[0].close()
        return seconds


class Zygote:
    """Start a process that has imported torch and forks workers from then on."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        ready, done = os.pipe()
        if os.fork() == 0:
            os.close(self._writer)
            os.close(ready)
            _fork_on_demand(reader, done)
            os._exit(0)
        os.close(reader)
        os.close(done)
        os.read(ready, 1)
        os.close(ready)

    def fork(self, count: int, address: str) -> None:
        data = address.encode()
        os.write(self._writer, struct.pack("ii", count, len(data)) + data)

    def close(self) -> None:
        os.close(self._writer)
        os.wait()


def _fork_on_demand(reader: int, done: int) -> None:
    import numpy  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # Ended workers are reaped automatically.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    os.write(done, b"1")
    while head := os.read(reader, 8):
        count, size = struct.unpack("ii", head)
        address = os.read(reader, size).decode()
        for rank in range(count):
            if os.fork() == 0:
                os.close(reader)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                _serve(address, rank)
                os._exit(0)


def _serve(address: str, rank: int) -> None:
    worker = base.Worker()
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.setsockopt(zmq.IDENTITY, b"w%d" % rank)
    socket.connect(address)
    socket.send(b"")
    while True:
        method, body = socket.recv_multipart()
        if not method:
            return
        socket.send(pickle.dumps(getattr(worker, method.decode())(*pickle.loads(body))))


class Floor(base.System):
    def start(self) -> None:
        self._zygote = Zygote()

    def spawn(self, count: int, torch: bool) -> base.Pool:
        return FloorPool(self._zygote, count, torch)

    def reads(self, size: int, transport: str = "") -> base.Task:
        return Copies(FloorPool(self._zygote, 1, True), size, 1)

    def states(self, ranks: int) -> base.Task:
        return Copies(FloorPool(self._zygote, ranks, True), state.SIZE, ranks)

    def groups(self, ranks: int) -> base.Task:
        return FirstSums(self._zygote, ranks)

    def failures(self, kind: str) -> base.Task:
        return Notices() if kind == "pending" else Forks(self._zygote)

    def training(self, model: str, hand: bool = False) -> base.Task:
        return torchrun.Training(model)

    def recorded(self, model: str) -> base.Task:
        return torchrun.Training(model)

    def stop(self) -> None:
        self._zygote.close()


SYSTEM = Floor()
