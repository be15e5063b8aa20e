"""The interface of a system, and the worker that every system runs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any


class Unsupported(Exception):
    """The system cannot do this; the text gives the reason."""


class Worker:
    """The same plain class in every system, so that the work at the far end is the same."""

    def __init__(self) -> None:
        self.kept: Any = None

    def echo(self, value: Any) -> Any:
        return value

    def ready(self) -> int:
        """Its pid, after a torch operation that shows that torch works here."""
        import torch

        torch.set_num_threads(1)
        return os.getpid() if float((torch.ones(4) + 1).sum()) == 8.0 else 0

    def touch(self, array: Any) -> float:
        """Read all bytes, so that lazily loaded ones do not count as delivered."""
        return touch(array)

    def keep(self, kind: str, size: int) -> int:
        self.kept = payload(kind, size)
        return size

    def fetch(self) -> Any:
        return self.kept

    def first_sum(self, port: int, rank: int, size: int) -> float:
        """Return the sum of a one from each rank of a process group, which is created for that."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    def cpu(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()

    def copy(self, size: int, count: int) -> list[float]:
        """Return the seconds of torch copies into existing memory."""
        import torch

        torch.set_num_threads(1)
        if self.kept is None or self.kept[0].nbytes != size:
            self.kept = [torch.full((size,), value, dtype=torch.uint8) for value in (1, 2)]
        source, target = self.kept
        return [timed(lambda: target.copy_(source)) for _ in range(count)]


def timed(call: Any) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def free_port() -> int:
    """Return a free TCP port of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def payload(kind: str, size: int) -> Any:
    """Return so many bytes of float32 ones: a ``torch`` tensor or a ``numpy`` array; or ``bytes``, or an ``int``."""
    if kind == "int":
        return 1
    if kind == "bytes":
        return bytes(size)
    if kind == "torch":
        import torch

        return torch.ones(size // 4, dtype=torch.float32)
    import numpy

    return numpy.ones(size // 4, dtype=numpy.float32)


def touch(array: Any) -> float:
    """Return the sum of all elements."""
    if isinstance(array, bytes):
        import numpy

        array = numpy.frombuffer(array, numpy.uint8)
    return float(array.sum())


class Pool:
    """Workers of a system; every one has answered when it is made."""

    def greet(self, torch: bool) -> None:
        """Make every worker answer once, with torch if it must be ready."""
        if torch:
            self.all("ready")
        else:
            self.all("echo", 0)

    def one(self, method: str, *args: Any) -> Any:
        """Call the first worker and wait."""
        raise Unsupported("no call of one worker")

    def all(self, method: str, *args: Any) -> list[Any]:
        """Call all workers, wait, and return the results by rank."""
        raise Unsupported("no call of all workers")

    def flight_one(self, values: Sequence[Any]) -> None:
        """Return echoes of the first worker, all sent before the first is awaited."""
        raise Unsupported("no calls in flight")

    def flight_all(self, values: Sequence[Any]) -> None:
        """Return echoes of all workers, all sent before the first is awaited."""
        raise Unsupported("no calls in flight")

    def close(self) -> None:
        """End the workers."""


class Task:
    """Repeated work of a system, with its own processes."""

    def run(self, count: int) -> list[float]:
        """Run so many times, and return the figures."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes."""


class System:
    """One system under test. A module in ``systems`` has one as ``SYSTEM``; it imports the package in ``start``."""

    def start(self) -> None:
        """Start the controller, without workers."""

    def spawn(self, count: int, torch: bool) -> Pool:
        """Start workers, with torch ready in each if asked for."""
        raise NotImplementedError

    def reads(self, size: int, transport: str = "") -> Task:
        """Let a process read so much memory of another one; each figure is the seconds of a read."""
        raise Unsupported("no reading of another process's memory")

    def training(self, model: str, hand: bool = False) -> Task:
        """Train on two ranks a model of ``systems.training``; the figures are the seconds of all and the loss.

        Args:
            model: one of ``systems.training.MODELS``.
            hand: whether the program creates its process group itself, if the system has one of its own.
        """
        raise Unsupported("no training")

    def recorded(self, model: str) -> Task:
        """Train like ``training``, with a step that is recorded once; the figures are the seconds of all, the loss, and
        the median CPU seconds that the program takes to issue a step, if it does."""
        raise Unsupported("no recorded steps")

    def groups(self, ranks: int) -> Task:
        """Let so many new ranks create a process group and sum over it; each figure is the seconds of that."""
        raise Unsupported("no process groups")

    def failures(self, kind: str) -> Task:
        """Kill processes; see ``failures.py`` for the kinds; figures in seconds."""
        raise Unsupported("no failures")

    def states(self, ranks: int) -> Task:
        """Copy the state dict of ``systems.state`` to so many ranks; each figure is the seconds until all have
        it."""
        raise Unsupported("no copying of states")

    def stop(self) -> None:
        """Shut down what ``start`` started."""
