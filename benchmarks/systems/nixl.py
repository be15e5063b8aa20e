"""NIXL called directly: one plain process registers memory and sleeps, the other one reads it."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from systems import base


def _agent(name: str) -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def _own(pipe: Any, size: int) -> None:
    """The owner: sends the location of its memory, and waits until the pipe is closed."""
    import torch

    torch.set_num_threads(1)
    data = torch.full((size,), 7, dtype=torch.uint8)
    agent = _agent("owner")
    registered = agent.register_memory([(data.data_ptr(), size, 0, "")], "DRAM")
    pipe.send((bytes(agent.get_agent_metadata()), data.data_ptr()))
    try:
        pipe.recv()
    except EOFError:
        agent.deregister_memory(registered)


class Reads(base.Task):
    def __init__(self, size: int) -> None:
        import torch

        torch.set_num_threads(1)
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_own, args=(theirs, size), daemon=True)
        self._process.start()
        theirs.close()
        self._data = torch.full((size,), 1, dtype=torch.uint8)
        self._agent = _agent("reader")
        metadata, self._address = self._pipe.recv()
        self._owner = self._agent.add_remote_agent(metadata)
        self.run(2)

    def run(self, count: int) -> list[float]:
        self._data[0] = self._data[-1] = 0
        seconds = [base.timed(self._read) for _ in range(count)]
        if int(self._data[0]) != 7 or int(self._data[-1]) != 7:
            raise ValueError("not what the other one has")
        return seconds

    def _read(self) -> None:
        agent, size, start = self._agent, self._data.nbytes, self._data.data_ptr()
        # Not before all reads: our target memory is not registered in advance either.
        registered = agent.register_memory([(start, size, 0, "")], "DRAM")
        here = agent.get_xfer_descs([(start, size, 0)], "DRAM")
        there = agent.get_xfer_descs([(self._address, size, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._owner)
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)
        if state == "ERR":
            raise RuntimeError("the transfer failed")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)


class Nixl(base.System):
    def reads(self, size: int, transport: str = "") -> base.Task:
        return Reads(size)


SYSTEM = Nixl()
