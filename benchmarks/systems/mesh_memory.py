"""Remote reads of memory, and copies of states: with this project and with torchmonarch."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer
from systems import base
from systems.state import Weights

_WAIT = 60


class Memory(Actor):
    """Has memory to read, or reads it."""

    @endpoint
    def offer(self, size: int) -> Any:
        import torch

        self._data = torch.full((size,), 7, dtype=torch.uint8)
        self._buffer = RDMABuffer(self._data)
        return self._buffer

    @endpoint
    def prepare(self, buffer: Any, size: int) -> str:
        """Return the transport."""
        import torch

        self._data = torch.full((size,), 1, dtype=torch.uint8)
        self._buffer = buffer
        return buffer.backend

    @endpoint
    def read(self, count: int) -> list[float]:
        self._data[0] = self._data[-1] = 0
        seconds = [base.timed(lambda: self._buffer.read_into(self._data).get()) for _ in range(count)]
        if int(self._data[0]) != 7 or int(self._data[-1]) != 7:
            raise ValueError("not what the other one has")
        return seconds


class Reads(base.Task):
    def __init__(self, size: int, transport: str) -> None:
        env = {"MONARCH_RDMA_TRANSPORTS": transport} if transport else None
        self._procs = this_host().spawn_procs({"gpus": 2}, env=env)
        actors = self._procs.spawn("memory", Memory)
        self._reader = actors.slice(gpus=1)
        buffer = actors.slice(gpus=0).offer.call_one(size).get()
        backend = self._reader.prepare.call_one(buffer, size).get()
        if transport and backend != transport:
            raise base.Unsupported(f"by {backend} and not by {transport}")
        self.run(2)

    def run(self, count: int) -> list[float]:
        return self._reader.read.call_one(count).get()

    def close(self) -> None:
        self._procs.stop().get(timeout=_WAIT)


class State(Actor):
    """Has a state to copy, or receives it in its own."""

    def __init__(self) -> None:
        self._weights = Weights()

    def weights(self) -> dict[str, Any]:
        return self._weights.state

    @endpoint
    def fill(self, value: float) -> None:
        self._weights.fill(value)

    @endpoint
    def check(self, value: float) -> bool:
        return self._weights.check(value)

    @endpoint
    def offer(self) -> dict[str, Any]:
        """Return buffers of the tensors, for torchmonarch."""
        self._buffers = {name: RDMABuffer(tensor.view(-1)) for name, tensor in self._weights.state.items()}
        return self._buffers

    @endpoint
    def take(self, buffers: dict[str, Any]) -> None:
        state = self._weights.state
        for future in [buffer.read_into(state[name].view(-1)) for name, buffer in buffers.items()]:
            future.get()


class States(base.Task):
    def __init__(self, ranks: int) -> None:
        self._procs = [this_host().spawn_procs({"gpus": count}) for count in (1, ranks)]
        self._source, self._targets = (procs.spawn("state", State) for procs in self._procs)
        self._value = 0.0
        try:
            from monarch.distributed import copy_state
        except ImportError:
            buffers = self._source.offer.call_one().get()
            self._copy = lambda: self._targets.take.call(buffers).get()
        else:
            self._copy = lambda: copy_state(self._source.weights, self._targets.weights).get()
        self.run(1)

    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        self._value += 1.0
        self._source.fill.call_one(self._value).get()
        seconds = base.timed(self._copy)
        if not all(self._targets.check.call(self._value).get().values()):
            raise ValueError("not what the source has")
        return seconds

    def close(self) -> None:
        for procs in self._procs:
            procs.stop().get(timeout=_WAIT)
