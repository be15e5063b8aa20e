"""Keeps libzmq from aborting a process without free descriptors when an ipc connection arrives.

``ipc_listener_t::accept`` asserts on nearly every error of accept4: ENFILE is tolerated and drops the attempt, EMFILE
calls abort. The tcp listener tolerates both. Nothing outside can prevent it at that moment, since user code may exhaust
the descriptors of a process at any time. So the call itself is replaced: the entry for accept4 in the linkage table of
libzmq leads to a few instructions that call it, wait 10 ms if it fails by EMFILE, and return ENFILE. The connection
stays in the queue of the listener, which retries.

Only for libzmq, and only on machines whose instructions are here; if the entry is not found, nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from zmq.backend.cython import _zmq  # pyright: ignore[reportPrivateUsage]

_PT_DYNAMIC = 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_STRSZ, _DT_JMPREL = 2, 5, 6, 7, 8, 10, 23
_STUBS = {
    "x86_64": bytes.fromhex(
        "f30f1efa 4883ec08"  # endbr64; sub rsp, 8
        "ff1532000000 83f8ff 7527"  # call accept4; cmp eax, -1; jne done
        "ff152f000000 833818 7517"  # call __errno_location; cmp dword [rax], EMFILE; jne fail
        "bf10270000 ff1527000000"  # mov edi, 10000; call usleep
        "ff1519000000 c70017000000"  # call __errno_location; mov dword [rax], ENFILE
        "b8ffffffff"  # fail: mov eax, -1
        "4883c408 c3 90"  # done: add rsp, 8; ret
    ),
}
"""By machine: an accept4 that returns ENFILE, after 10 ms, for EMFILE. The addresses of the three functions follow
it."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Object(ctypes.Structure):
    """A loaded object, as reported by dl_iterate_phdr: struct dl_phdr_info."""

    _fields_ = (
        ("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("headers", ctypes.c_size_t), ("count", ctypes.c_uint16),
    )  # fmt: skip


@cache
def tolerate_full_table() -> bool:
    """Make libzmq of this process survive accept without a descriptor; return whether that worked."""
    stub = _STUBS.get(platform.machine())
    if stub is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    with suppress(OSError, AttributeError, KeyError, ValueError):
        slots = [slot for base, dynamic in _libzmq() for slot in _slots(base, dynamic, b"accept4")]
        for slot in slots:
            _replace(slot, stub)
        return bool(slots)
    return False


def _libzmq() -> Iterator[tuple[int, int]]:
    """Yield the address of the object that has libzmq, and of its dynamic section."""
    inside = ctypes.cast(ctypes.CDLL(_zmq.__file__).zmq_ctx_new, ctypes.c_void_p).value or 0
    found: list[tuple[int, int]] = []

    def look(pointer: int, _size: int, _data: int) -> int:
        each = _Object.from_address(pointer)
        headers = [struct.unpack("IIQQQQQQ", ctypes.string_at(each.headers + 56 * i, 56)) for i in range(each.count)]
        if any(kind == 1 and 0 <= inside - each.base - at < size for kind, _, _, at, _, _, size, _ in headers):
            found.extend((each.base, each.base + h[3]) for h in headers if h[0] == _PT_DYNAMIC)
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
    _libc.dl_iterate_phdr(kind(look), None)
    yield from found


def _slots(base: int, dynamic: int, name: bytes) -> Iterator[int]:
    """Yield the addresses of the entries of a function in the linkage tables of an object."""
    known: dict[int, int] = {}
    while (entry := struct.unpack("qQ", ctypes.string_at(dynamic, 16)))[0]:
        known[entry[0]] = entry[1]
        dynamic += 16
    # Some loaders put addresses there, some leave the file's values.
    at = {tag: value + base * (value < base) for tag, value in known.items()}
    tables = [
        ctypes.string_at(at[table], known[size])
        for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ))
        if known.get(size)
    ]
    # Whole tables at a time: each call of ctypes takes a microsecond, and there are thousands of entries.
    entries = [(slot, info >> 32) for table in tables for slot, info, _ in struct.iter_unpack("QQq", table)]
    symbols = ctypes.string_at(at[_DT_SYMTAB], 24 * (1 + max((symbol for _, symbol in entries), default=0)))
    names = ctypes.string_at(at[_DT_STRTAB], known[_DT_STRSZ])
    named: dict[int, bool] = {}
    for slot, symbol in entries:
        if symbol not in named:
            start = int.from_bytes(symbols[24 * symbol : 24 * symbol + 4], "little")
            named[symbol] = names.startswith(name + b"\0", start)
        if named[symbol]:
            yield base + slot


def _replace(slot: int, stub: bytes) -> None:
    """Point an entry of a linkage table to a stub of its own, which is never unloaded."""
    functions = (_libc.accept4, getattr(_libc, "__errno_location"), _libc.usleep)
    targets = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions]
    code = stub + struct.pack("3Q", *targets)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # First written, then made executable: no page is both at any time, which hardened systems forbid.
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    memory.write(code)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _protect(start, mmap.PROT_READ | mmap.PROT_EXEC)
    _protect(slot - slot % mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    # For good: threads of libzmq may run it while this interpreter exits.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    ctypes.c_size_t.from_address(slot).value = start


def _protect(page: int, access: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), access):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
