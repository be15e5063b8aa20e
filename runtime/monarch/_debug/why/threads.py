"""The activity of a call's thread: from its Python frames, and from what the kernel knows of it."""

from __future__ import annotations

import dis
import linecache
import os
import sys
import threading
import time
from ipaddress import IPv6Address
from types import FrameType
from typing import Any, NamedTuple

from monarch._core.diagnosis.facts import FORMING, Entered, FileLockHolder, Kind
from monarch._core.kinds import class_of, is_dict
from monarch._core.places import is_ours, is_users
from monarch._debug.frames import users_frames
from monarch._debug.why.holders import wait_for
from monarch._debug.why.known_waits import known_wait
from monarch._debug.why.workers_compat import doing_of
from monarch._procs.os.blocked import Blocked, CallKind, WaitKind, awaited_child, blocked, ran_on_cpu, system_call
from monarch._procs.os.children import at_other_end, child_named, command_of, only_child
from monarch._procs.os.file_locks import lock_holders
from monarch._python.frames import frame_of
from monarch._python.threads import is_own

_LOOK = 0.02
"""Seconds between two looks at a thread."""
_RAN = 0.25
"""Part of that time on a CPU from which on a thread runs."""
_CALLS = ("CALL", "PRECALL")
_INODE = 9
"""The column of a socket's inode in /proc/net/tcp."""


class ThreadActivity(NamedTuple):
    """The activity of a thread."""

    kind: Kind
    what: str = ""
    entered: Entered | None = None
    is_deadlock: bool = False
    """Whether it waits for another thread that waits for it."""
    is_work: bool = False
    """Whether it waits for a Work of ``torch.distributed``, which tells little of its collective."""
    holders: tuple[FileLockHolder, ...] = ()
    """Other processes that hold the lock on a file that it waits for."""
    advice: str = ""


_BETWEEN_PROCESSES = "multiprocessing.synchronize"
"""The module of locks whose methods are of each object, not of their classes."""
_CALLED = {
    CallKind.SELECT: ThreadActivity(Kind.SOCKET, "any of several"),
    CallKind.OPEN: ThreadActivity(Kind.FILE, "opening it"),
    CallKind.SIGNAL: ThreadActivity(Kind.EVENT, "a signal"),
    CallKind.SYNC: ThreadActivity(Kind.FILE, "flushing it to disk"),
}


_STORE = "a reply from a torch.distributed store"
_OWN_FILE_LOCK = ThreadActivity(
    Kind.LOCK, "a file lock, held by this process through another descriptor", is_deadlock=True,
    advice="lock the file once, or unlock it before it is locked through another descriptor",
)  # fmt: skip
_EVENTFD = ThreadActivity(Kind.EVENT, "an eventfd")
_INODES = {
    "anon_inode:[eventfd]": _EVENTFD,
    "anon_inode:[eventpoll]": ThreadActivity(Kind.SOCKET, "any of several"),
    "anon_inode:[signalfd]": ThreadActivity(Kind.EVENT, "a signal"),
    "anon_inode:[timerfd]": ThreadActivity(Kind.SLEEP),
    "anon_inode:[pidfd]": ThreadActivity(Kind.CHILD),
}
"""By the link of a file descriptor, what waits for it wait for."""


def look_at(ident: int, rank: int) -> ThreadActivity:
    """Return the activity of a thread.

    Args:
        ident: the ident of the thread.
        rank: the rank of this process.
    """
    ran, begun = ran_on_cpu(ident), time.monotonic()
    # The frame is not kept meanwhile: its code may end, and what it holds would be released in this thread.
    place = _place(frame_of(ident))
    time.sleep(_LOOK)
    share = (ran_on_cpu(ident) - ran) / (time.monotonic() - begun)
    frame = frame_of(ident)
    if frame is None:
        return ThreadActivity(Kind.IDLE)
    # A thread that wants the GIL is in a futex too, but runs now and then.
    moves = place != _place(frame)
    wait = Blocked(WaitKind.NONE) if share >= _RAN else blocked(ident)
    if moves and wait.wait is WaitKind.OTHER:
        wait = Blocked(WaitKind.NONE)
    collective = _collective(frame, rank, wait.wait is WaitKind.OTHER)
    if collective is not None:
        return ThreadActivity(Kind.COLLECTIVE, "", collective, is_work=_is_work(collective))
    known = known_wait(frame, is_users)
    if known is not None:
        kind, what = known[0].look(known[1].f_locals)
        if kind is Kind.SOCKET and not what and wait.wait is WaitKind.SOCKET:
            what = _of_files(wait.files).what
        return ThreadActivity(kind, what)
    if wait.wait is WaitKind.NONE:
        return ThreadActivity(Kind.C_CODE if not moves and _calls(frame) else Kind.PYTHON)
    return _blocked(ident, frame, wait)


def collective_beside(ident: int, rank: int) -> tuple[ThreadActivity, list[FrameType]] | None:
    """Return the collective that another thread of this rank is in, which the user's code has started, and its frames.

    Args:
        ident: the ident of the thread that waits for others.
        rank: the rank of this process.
    """
    for each in threading.enumerate():
        other = each.ident
        frame = frame_of(other) if other not in (None, ident, threading.get_ident()) else None
        if frame is None or other is None or is_own(each):
            continue
        found = _collective(frame, rank, blocked(other).wait is WaitKind.OTHER)
        if found is not None:
            return ThreadActivity(
                Kind.COLLECTIVE, f"thread {each.name!r}", found, is_work=_is_work(found)
            ), users_frames(frame)
    return None


def _is_work(entered: Entered) -> bool:
    return not entered.is_message and not entered.tensors and entered.operation not in ("barrier", FORMING)


def _place(frame: FrameType | None) -> tuple[int, int]:
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)


def _collective(frame: FrameType, rank: int, in_futex: bool) -> Entered | None:
    # Looked up, not imported: a rank without collectives has no torch.distributed, and importing it takes long.
    if "monarch._tensors.collectives.waiting" not in sys.modules and "torch.distributed" not in sys.modules:
        return None
    from monarch._tensors.collectives.details import entered

    return entered(frame, rank, in_futex)


def _calls(frame: FrameType) -> bool:
    """Return whether a frame is calling a function, which is in C if the frame is the innermost one."""
    name = _instruction(frame)
    return name.startswith(_CALLS)


def _instruction(frame: FrameType) -> str:
    return next((each.opname for each in dis.get_instructions(frame.f_code) if each.offset == frame.f_lasti), "")


def _blocked(ident: int, frame: FrameType, wait: Blocked) -> ThreadActivity:
    if wait.wait is WaitKind.SLEEP:
        return _asleep(frame)
    if wait.wait is WaitKind.SOCKET:
        look = _of_files(wait.files)
        if look.kind is Kind.SOCKET and any(_is_store(each) for each in _named(frame)):
            return look._replace(what=", ".join(filter(None, [_STORE, look.what])))
        # ZeroMQ receives in a thread of its own, which wakes others by an eventfd.
        is_zmq = look is _EVENTFD and any(class_of(each).__module__.startswith("zmq.") for each in _named(frame))
        return ThreadActivity(Kind.SOCKET, "a ZeroMQ socket") if is_zmq else look
    call = system_call(ident)
    if call is CallKind.CHILD:
        pid = awaited_child(ident) or only_child()
        return ThreadActivity(Kind.CHILD, child_named(pid) + doing_of(pid or None))
    if call is CallKind.FILE_LOCK:
        return _at_file_lock()
    if call is not None:
        return _CALLED[call]
    lock = _lock_of(frame)
    if lock is not None:
        if class_of(lock).__module__ == _BETWEEN_PROCESSES:
            return ThreadActivity(Kind.LOCK, f"multiprocessing.{class_of(lock).__name__}")
        known = wait_for(lock, ident, _lock_of)
        return ThreadActivity(Kind.LOCK, known.text, None, known.is_deadlock)
    return ThreadActivity(Kind.C_CODE)


def _at_file_lock() -> ThreadActivity:
    pids = lock_holders(os.getpid())
    if os.getpid() in pids:
        return _OWN_FILE_LOCK
    return ThreadActivity(Kind.LOCK, "a file lock", holders=tuple(FileLockHolder(pid, command_of(pid)) for pid in pids))


def _asleep(frame: FrameType) -> ThreadActivity:
    """Return the sleep of a thread: of Python's ``sleep``, or in C code that tries again and again."""
    name = called_name(frame) if not is_ours(frame) else ""
    if not name or name.rpartition(".")[2] == "sleep":
        return ThreadActivity(Kind.SLEEP)
    # Their methods are the only code of SQLite that sleeps, and they do if another connection has locked the file.
    kinds = {class_of(each).__module__ for each in _named(frame)}
    return (
        ThreadActivity(Kind.LOCK, "a SQLite database lock")
        if "sqlite3" in kinds
        else ThreadActivity(Kind.SLEEP, f"in {name}()")
    )


def called_name(frame: FrameType) -> str:
    """Return the function that a frame is calling, as its source has it, as in ``dist.TCPStore``; empty if unknown."""
    if sys.version_info < (3, 11) or not _calls(frame):
        return ""
    found = next((each.positions for each in dis.get_instructions(frame.f_code) if each.offset == frame.f_lasti), None)
    if found is None or found.lineno is None or found.col_offset is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, found.lineno, frame.f_globals)
    name, opens, _ = line.encode()[found.col_offset :].decode(errors="replace").partition("(")
    return name.strip() if opens and name.replace(".", "").strip().isidentifier() else ""


def _of_files(files: tuple[int, ...]) -> ThreadActivity:
    links = [_link(file) for file in files]
    if any(link.startswith("socket:") for link in links):
        return ThreadActivity(Kind.SOCKET, _peer(next(link for link in links if link.startswith("socket:"))))
    pipe = next((link for link in links if link.startswith("pipe:")), "")
    if pipe:
        other = at_other_end(pipe)
        return ThreadActivity(
            Kind.PIPE, f"shared with child process {other[1]} (pid {other[0]})" if other is not None else ""
        )
    inode = next((each for link in links if (each := _INODES.get(link)) is not None), None)
    if inode is not None:
        return inode
    return ThreadActivity(Kind.FILE, links[0]) if links and links[0] else ThreadActivity(Kind.SOCKET)


def _is_store(value: Any) -> bool:
    kinds = class_of(value).__mro__
    return any(each.__name__ == "Store" and each.__module__.startswith("torch.") for each in kinds)


def _link(file: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""


def _peer(link: str) -> str:
    """Return the address at the other end of a TCP connection, from its link in /proc; empty if it has none.

    The socket is left alone: a copy of it would look like a new connection to code that looks for those.
    """
    inode = link[len("socket:[") : -1]
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{table}") as file:
                rows = [line.split() for line in file]
        except OSError:
            continue
        for row in rows[1:]:
            if len(row) > _INODE and row[_INODE] == inode:
                address, _, port = row[2].partition(":")
                return f"port {int(port, 16)} of {_address(address)}" if int(port, 16) else ""
    return ""


def _address(text: str) -> str:
    """Return an address of /proc/net as people write it: words of 32 bits in the byte order of this machine."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    # IPv4 in IPv6.
    data = data[12:] if data[:12] == bytes(10) + b"\xff\xff" else data
    return ".".join(map(str, data)) if len(data) == 4 else str(IPv6Address(data))


def _lock_of(frame: FrameType) -> Any:
    """Return the lock that a frame waits for: one on which it calls ``acquire`` or enters a ``with`` block."""
    name = _instruction(frame)
    if not (name.startswith(_CALLS) or name == "BEFORE_WITH" or name.startswith("LOAD_SPECIAL")):
        return None
    for value in _named(frame):
        kind = class_of(value)
        if (hasattr(kind, "acquire") and hasattr(kind, "release")) or kind.__module__ == _BETWEEN_PROCESSES:
            return value
    return None


def _named(frame: FrameType) -> list[Any]:
    """Return the values of the variables and attributes that the statement of a frame reads."""
    values: list[Any] = []
    for each in dis.get_instructions(frame.f_code):
        line = each.positions.lineno if sys.version_info >= (3, 11) and each.positions is not None else None
        if each.offset > frame.f_lasti or (line is not None and line != frame.f_lineno):
            continue
        if each.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")) and type(each.argval) is str:
            known = frame.f_locals if each.argval in frame.f_locals else frame.f_globals
            values.append(known.get(each.argval))
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and values:
            # Only what is stored is read, so no code of the user runs.
            stored = getattr(values[-1], "__dict__", None)
            values.append(stored.get(each.argval) if is_dict(stored) else None)
    return [each for each in reversed(values) if each is not None]
