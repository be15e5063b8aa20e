"""The memory of this process that others may read and write, and how they see that it still may be.

Each piece has a slot, a word of this process's memory that holds the key of the piece, and zero once it is dropped. Who
reads from outside looks at the slot before and after; so that costs the owner nothing, however busy it is.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from typing import NamedTuple

from monarch._tensors.memory.views import Memory

_SLOTS = 512


class Remote(NamedTuple):
    """A piece of memory as other processes know it: what travels in messages."""

    proc: str
    """Proc id of its owner."""
    title: str
    """The owner in words, such as ``rank 3 of trainers``."""
    pid: int
    slot: int
    """Address of its slot in the owner."""
    key: int
    address: int
    """In the owner, of the whole piece."""
    offset: int
    """Bytes from there to what is meant."""
    size: int
    """Bytes that are meant."""
    dtype: str
    device: str
    readonly: bool
    gpu: bytes = b""
    """For memory of a GPU how another process of the host opens it; see cuda_ipc."""

    @property
    def start(self) -> int:
        """Address in the owner of what is meant."""
        return self.address + self.offset


class Registry:
    """The pieces of this process's memory that others may use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Memory, ctypes.c_uint64]] = {}
        self._free: list[ctypes.c_uint64] = []
        # Never freed: others may look at a slot at any time.
        self._tables: list[ctypes.Array[ctypes.c_uint64]] = []

    def add(self, memory: Memory, proc: str, title: str, gpu: bytes = b"") -> Remote:
        """Lets others use a piece of memory, which is kept until it is dropped."""
        key = secrets.randbits(63) | 1
        with self._lock:
            slot = self._slot()
            slot.value = key
            self._known[key] = (memory, slot)
        return Remote(
            proc=proc,
            title=title,
            pid=os.getpid(),
            slot=ctypes.addressof(slot),
            key=key,
            address=memory.address,
            offset=0,
            size=memory.size,
            dtype=memory.dtype,
            device=memory.device,
            readonly=memory.readonly,
            gpu=gpu,
        )

    def _slot(self) -> ctypes.c_uint64:
        if not self._free:
            table = (ctypes.c_uint64 * _SLOTS)()
            self._tables.append(table)
            word = ctypes.sizeof(ctypes.c_uint64)
            self._free = [ctypes.c_uint64.from_buffer(table, index * word) for index in range(_SLOTS)]
        return self._free.pop()

    def get(self, key: int) -> Memory | None:
        """A piece by its key; None if it was dropped."""
        found = self._known.get(key)
        return found[0] if found is not None else None

    def slot_table(self, key: int) -> tuple[int, int] | None:
        """Address and size of the table that has the slot of a piece; it stays when the piece is dropped."""
        found = self._known.get(key)
        if found is not None:
            slot = ctypes.addressof(found[1])
            for table in self._tables:
                start, size = ctypes.addressof(table), ctypes.sizeof(table)
                if start <= slot < start + size:
                    return start, size
        return None

    def drop(self, key: int) -> bool:
        """Lets nobody use a piece any more; whether there was one."""
        with self._lock:
            found = self._known.pop(key, None)
            if found is None:
                return False
            # Before the memory goes: who reads it now will see that it has.
            found[1].value = 0
            self._free.append(found[1])
        return True

    def clear(self) -> None:
        """Drops all."""
        for key in list(self._known):
            self.drop(key)

    def __len__(self) -> int:
        return len(self._known)
