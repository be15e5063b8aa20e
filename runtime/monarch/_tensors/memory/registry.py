"""The memory of this process that others may read and write, and how they check that it is still valid.

Each piece has a slot, a word of this process's memory that holds the key of the piece, and zero once it is dropped.
Remote readers check the slot before and after; so that costs the owner nothing, however busy it is.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from typing import NamedTuple

from monarch._tensors.memory.views import Memory

_SLOTS = 512


class MemoryReference(NamedTuple):
    """A reference to exported memory, as it travels in messages."""

    proc: str
    """Proc id of its owner."""
    title: str
    """Name of the owner, such as ``rank 3 of trainers``."""
    pid: int
    slot: int
    """Address of its slot in the owner."""
    key: int
    address: int
    """Address in the owner, of the whole piece."""
    offset: int
    """Offset in bytes of the referenced part."""
    size: int
    """Size in bytes of the referenced part."""
    dtype: str
    device: str
    readonly: bool
    gpu: bytes = b""
    """For GPU memory, how another process of the host opens it; see cuda_ipc."""

    @property
    def start(self) -> int:
        """Return the address of the referenced part in the owner."""
        return self.address + self.offset


class Registry:
    """The exported memory of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Memory, ctypes.c_uint64]] = {}
        """By key, the memory and its slot. Lock for writing: ``_lock``."""
        self._free: list[ctypes.c_uint64] = []
        """Unused slots. Lock: ``_lock``."""
        # Never freed: others may check a slot at any time.
        self._tables: list[ctypes.Array[ctypes.c_uint64]] = []

    def add(self, memory: Memory, proc: str, title: str, gpu: bytes = b"") -> MemoryReference:
        """Export a piece of memory, which is kept until dropped."""
        key = secrets.randbits(63) | 1
        with self._lock:
            slot = self._slot()
            slot.value = key
            self._known[key] = (memory, slot)
        return MemoryReference(
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
        """Return a piece by its key; None if it was dropped."""
        entry = self._known.get(key)
        return entry[0] if entry is not None else None

    def slot_table(self, key: int) -> tuple[int, int] | None:
        """Return address and size of the table with the slot of a piece; it stays when the piece is dropped."""
        entry = self._known.get(key)
        if entry is not None:
            slot = ctypes.addressof(entry[1])
            for table in self._tables:
                start, size = ctypes.addressof(table), ctypes.sizeof(table)
                if start <= slot < start + size:
                    return start, size
        return None

    def drop(self, key: int) -> bool:
        """Withdraw a piece; return whether it existed."""
        with self._lock:
            entry = self._known.pop(key, None)
            if entry is None:
                return False
            # Before the memory goes: concurrent readers then see that it has.
            entry[1].value = 0
            self._free.append(entry[1])
        return True

    def clear(self) -> None:
        """Drop all."""
        for key in list(self._known):
            self.drop(key)

    def __len__(self) -> int:
        return len(self._known)
