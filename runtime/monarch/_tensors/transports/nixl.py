"""NIXL: one-sided transfers by UCX's best path, such as RDMA between hosts with the hardware for it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from monarch._procs.os.helpers import as_helper
from monarch._tensors.memory.registry import MemoryReference, Registry
from monarch._tensors.transports.base import Move, dropped, lost_meanwhile
from monarch.exceptions import TransferError

# By process: its agent's name and metadata, for other agents to add.
Exposed = tuple[str, bytes]


@cache
def is_installed() -> bool:
    """Return whether this process can use NIXL."""
    return importlib.util.find_spec("nixl") is not None


_Ask = Callable[[MemoryReference, list[int], float], Exposed | None]


class _Span(NamedTuple):
    local: int
    remote: int
    size: int


class _Failed(Exception):
    """A transfer that NIXL has abandoned."""


class _Registered:
    """The memory registered with an agent, each range once, however many users it has.

    NIXL crashes if a range is registered twice and one of the two is removed.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._ranges: dict[tuple[int, int], tuple[Any, int]] = {}

    def add(self, start: int, size: int) -> tuple[int, int]:
        """Register a range, or one that it is a part of; return that, for ``remove``."""
        key = next((each for each in self._ranges if each[0] <= start and start + size <= sum(each)), (start, size))
        registered, uses = self._ranges.get(key, (None, 0))
        if not uses:
            registered = self._agent.register_memory([(*key, 0, "")], "DRAM")
        self._ranges[key] = (registered, uses + 1)
        return key

    def remove(self, key: tuple[int, int]) -> None:
        """Release one use."""
        registered, uses = self._ranges.pop(key)
        if uses > 1:
            self._ranges[key] = (registered, uses - 1)
        else:
            self._agent.deregister_memory(registered)


def _check(moves: Sequence[Move], keys: ctypes.Array[ctypes.c_uint64]) -> None:
    for (remote, _, _), key in zip(moves, keys, strict=True):
        if key != remote.key:
            raise dropped(remote)


class Nixl:
    """The NIXL transport, and the owner's side of it.

    Args:
        name: that of this process's agent, unique in the session.
        registry: this process's exported memory.
        ask: asks the owner of some memory to expose it, by keys; see ``expose``.
    """

    name = "nixl"

    def __init__(self, name: str, registry: Registry, ask: _Ask) -> None:
        self._name = name
        self._memories = registry
        self._ask = ask
        self._lock = threading.Lock()
        # Lock: _lock, down to _tables.
        self._agent: Any = None
        self._registered: Any = None
        self._exposed: dict[int, tuple[int, int]] = {}
        self._tables: set[tuple[int, int]] = set()
        """Registered slot tables: others check there whether a piece was dropped."""
        self._known: dict[tuple[str, int], str] = {}
        """The agents of other processes, by process and key of its memory. Single operations only."""

    def reason_against(self, remote: MemoryReference, local_device: str) -> str:
        if not is_installed():
            return "nixl is not installed here; run: pip install 'monarch-kernel[rdma]'"
        if remote.device != "cpu" or local_device != "cpu":
            return "it supports CPU memory only"
        try:
            self._agent_of([remote], 10.0)
        except TransferError as error:
            return str(error)
        except Exception as error:
            # UCX may find no path between two hosts, and raises its own errors.
            return f"NIXL cannot reach the owner: {type(error).__name__}: {error}"
        return ""

    # The owner

    def expose(self, keys: Sequence[int]) -> Exposed | None:
        """Register pieces of memory, so that other agents can reach them; None if one was dropped."""
        with self._lock:
            agent = self._own_agent()
            for key in keys:
                memory, table = self._memories.get(key), self._memories.slot_table(key)
                if memory is None or table is None:
                    return None
                if table not in self._tables:
                    self._tables.add(self._registered.add(*table))
                if key not in self._exposed:
                    self._exposed[key] = self._registered.add(memory.address, memory.size)
            return self._name, bytes(agent.get_agent_metadata())

    def hide(self, key: int) -> None:
        """Deregister a piece of memory."""
        with self._lock:
            exposed = self._exposed.pop(key, None)
            if exposed is not None:
                self._registered.remove(exposed)

    def _own_agent(self) -> Any:
        if self._agent is None:
            # Otherwise it prints its findings at each start.
            os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
            # Optional; typings/ has its types.
            from nixl._api import (  # pyright: ignore[reportMissingImports]
                nixl_agent,
                nixl_agent_config,
                nixl_thread_sync_t,
            )

            # Others may ask to expose memory during transfers of this process.
            strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            try:
                # Its busy-polling thread is started by this one.
                with as_helper():
                    self._agent = nixl_agent(self._name, nixl_agent_config(backends=["UCX"], sync_mode=strict))
            except Exception as error:
                raise TransferError(f"cannot use NIXL in this process: {error}") from error
            self._registered = _Registered(self._agent)
        return self._agent

    # The remote side

    def _agent_of(self, remotes: Sequence[MemoryReference], timeout: float) -> str:
        """Return the name of the owner's agent, which can reach these pieces."""
        proc = remotes[0].proc
        unknown = [remote.key for remote in remotes if (proc, remote.key) not in self._known]
        if unknown:
            exposed = self._ask(remotes[0], unknown, timeout)
            if exposed is None:
                raise dropped(remotes[0])
            with self._lock:
                self._own_agent().add_remote_agent(exposed[1])
            self._known.update({(proc, key): exposed[0] for key in unknown})
        return self._known[proc, remotes[0].key]

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        first = moves[0].remote
        until = time.monotonic() + timeout
        name = self._agent_of([move.remote for move in moves], timeout)
        keys = (ctypes.c_uint64 * len(moves))()
        word, start = ctypes.sizeof(ctypes.c_uint64), ctypes.addressof(keys)
        slots = [_Span(start + index * word, move.remote.slot, word) for index, move in enumerate(moves)]
        pieces = [
            _Span(local.address + mine, remote.start + theirs, size)
            for remote, local, rows in ((move.remote, move.local, move.rows) for move in moves)
            for theirs, mine, size in rows.tolist()
        ]
        with self._lock:
            ranges = [(start, len(moves) * word), *((local.address, local.size) for _, local, _ in moves)]
            used = [self._registered.add(*each) for each in ranges]
        try:
            try:
                self._transfer(name, slots, "READ", until)
                _check(moves, keys)
                self._transfer(name, pieces, "WRITE" if writing else "READ", until)
                self._transfer(name, slots, "READ", until)
            except TimeoutError:
                raise lost_meanwhile(first, writing, f"{first.title} did not answer for {timeout:g} s") from None
            except _Failed as error:
                raise lost_meanwhile(
                    first, writing, f"{first.title} has died or dropped the buffer ({error})"
                ) from None
        finally:
            with self._lock:
                for each in used:
                    self._registered.remove(each)
        for (remote, _, _), key in zip(moves, keys, strict=True):
            if key != remote.key:
                raise lost_meanwhile(remote, writing, f"{remote.title} has dropped the buffer")

    def _transfer(self, name: str, spans: Sequence[_Span], how: str, until: float) -> None:
        agent = self._agent
        local_pieces = agent.get_xfer_descs([(span.local, span.size, 0) for span in spans], "DRAM")
        remote_pieces = agent.get_xfer_descs([(span.remote, span.size, 0) for span in spans], "DRAM")
        handle = None
        try:
            handle = agent.initialize_xfer(how, local_pieces, remote_pieces, name)
            state = agent.transfer(handle)
            pause = 0.0
            while state not in ("DONE", "ERR"):
                if time.monotonic() > until:
                    raise TimeoutError
                # The transfer has its own thread, so this only waits for the result.
                time.sleep(pause)
                pause = min(0.001, pause + 0.00002)
                state = agent.check_xfer_state(handle)
        except TimeoutError:
            raise
        except Exception as error:
            raise _Failed(str(error)) from None
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)
        if state == "ERR":
            raise _Failed("the transfer failed")

    def forget(self, proc: str) -> None:
        """Forget a dead process."""
        # Other threads add keys meanwhile.
        names = {self._known.pop(key, "") for key in list(self._known) if key[0] == proc} - {""}
        with self._lock:
            for name in names:
                try:
                    self._agent.remove_remote_agent(name)
                except Exception:
                    # It was gone already.
                    continue

    def close(self) -> None:
        """Stop the agent."""
        with self._lock:
            self._exposed.clear()
            self._agent = self._registered = None
