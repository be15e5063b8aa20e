"""The TCP connections of collectives, closed to free a rank that waits in one.

Aborting a gloo group does not free a rank inside a collective (tried with torch 2.13); shutting down the sockets of the
group does, within milliseconds. They are found by comparing the open sockets before and after the group is created.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import EMFILE

_MOMENT_S = 0.2
"""Seconds between the two ends of a connection that is shut down."""
_CONNECT_S = 1.0
"""Seconds to connect to this process itself, whose system does so at once."""
_ending: dict[int, socket.socket] = {}
"""Connections that were shut down for reading only, by inode. Any thread, in single operations."""
_NOTICED_S = 5.0
"""Seconds within which torch notices that a connection was cut; later, its descriptor may be another one."""
_cut: dict[int, float] = {}
"""When connections were last cut, by descriptor. Any thread, in single operations."""
# It keeps the GIL, so threads share the memory for its result.
_c_getsockopt = ctypes.PyDLL(None).getsockopt
_c_shutdown = ctypes.PyDLL(None).shutdown
_c_shutdown.argtypes = [ctypes.c_int, ctypes.c_int]
_c_getsockopt.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_kind, _size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
_kind_at, _size_at = ctypes.addressof(_kind), ctypes.addressof(_size)


def open_sockets() -> set[tuple[int, int]]:
    """Return file descriptor and inode of each socket of this process, of any kind: checking the kind takes longer."""
    sockets: set[tuple[int, int]] = set()
    for number in _descriptors():
        # Not fstat for all: of a file, it may ask a file server, and wait for one that is down.
        if _c_getsockopt(number, socket.SOL_SOCKET, socket.SO_TYPE, _kind_at, _size_at) == 0:
            # Unless it was closed meanwhile.
            with suppress(OSError):
                sockets.add((number, os.fstat(number).st_ino))
    return sockets


def shut_down(sockets: set[tuple[int, int]]) -> int:
    """Shut down TCP connections of this process, without closing their descriptors.

    They end for reading at once, and in both directions a moment later. If a thread of gloo finds that it cannot write
    when it begins a transfer that its peer has just asked for, it ends without waking the thread that waits for the
    transfer, which then waits for half an hour. The end of its input wakes all. By the later moment, the peer's
    process, which is freed in the same way, has no thread that could write any more.

    Args:
        sockets: as from ``open_sockets``; other kinds than TCP are left alone.

    Returns:
        The number of connections.
    """
    ending: dict[int, socket.socket] = {}
    uncopied: list[tuple[int, int]] = []
    for number, inode in sockets:
        try:
            # Its number may be another file's by now; the copy is of the file being checked. It also keeps the
            # connection when gloo closes the descriptor.
            copy = os.dup(number)
        except OSError as error:
            if error.errno == EMFILE and _shut_down_itself(number, inode, socket.SHUT_RD):
                uncopied.append((number, inode))
            continue
        connection: socket.socket | None = None
        try:
            if os.fstat(copy).st_ino != inode or inode in _ending:
                os.close(copy)
                continue
            connection = socket.socket(fileno=copy)
            if _is_tcp(connection):
                connection.getpeername()
                _cut[number] = time.monotonic()
                connection.shutdown(socket.SHUT_RD)
                ending[inode] = connection
                continue
        except OSError:
            # Not connected, or no longer.
            pass
        if connection is not None:
            connection.close()
    if ending:
        _ending.update(ending)
        later(_MOMENT_S, lambda: _end(ending))
    if uncopied:
        later(_MOMENT_S, lambda: _end_uncopied(uncopied))
    return len(ending) + len(uncopied)


def _descriptors() -> Iterable[int]:
    """Return the descriptors of this process; all that it may have if none is free to look them up."""
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno != EMFILE:
            raise
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _shut_down_itself(number: int, inode: int, how: int) -> bool:
    """Shut down a TCP connection without a copy, for which no descriptor is free; return whether it was one."""

    def option(name: int) -> int:
        value, size = ctypes.c_int(-1), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
        _c_getsockopt(number, socket.SOL_SOCKET, name, ctypes.addressof(value), ctypes.addressof(size))
        return value.value

    if option(socket.SO_TYPE) != socket.SOCK_STREAM or option(socket.SO_ACCEPTCONN):
        return False
    if option(socket.SO_DOMAIN) not in (socket.AF_INET, socket.AF_INET6):
        return False
    with suppress(OSError):
        if os.fstat(number).st_ino == inode:
            _cut[number] = time.monotonic()
            return _c_shutdown(number, how) == 0
    return False


def was_cut(number: int) -> bool:
    """Return whether the connection with a descriptor has just been shut down here."""
    return time.monotonic() - _cut.get(number, float("-inf")) < _NOTICED_S


def end_listening(sockets: set[tuple[int, int]]) -> int:
    """Shut down TCP sockets of this process on which it waits for connections, which frees the threads that wait.

    Args:
        sockets: as from ``open_sockets``; all others are left alone.

    Returns:
        Their number.
    """
    ended = 0
    for number, inode in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            if _listens(copy, inode):
                copy.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def answer_listening(sockets: set[tuple[int, int]], members: int) -> None:
    """Connect to the TCP sockets on which gloo waits for members of a group, in their place, and close that soon.

    It frees a thread that makes the group, where the members that would connect to it have been freed before: it has no
    connection that could be shut down, and would wait for half an hour. gloo knows each by a number, which comes first.

    Args:
        sockets: as from ``open_sockets``; all others are left alone.
        members: the number of members.
    """
    made: list[socket.socket] = []
    for number, inode in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            if _listens(copy, inode):
                address = copy.getsockname()[:2]
                for turn in range(members):
                    made.append(socket.create_connection(address, _CONNECT_S))
                    made[-1].send(turn.to_bytes(8, sys.byteorder))
    if made:
        later(_MOMENT_S, lambda: _close(made))


def by_timer(seconds: float, action: Callable[[], None]) -> None:
    """Run something some seconds later in a thread."""
    timer = threading.Timer(seconds, action)
    timer.name, timer.daemon = "monarch-cut", True
    timer.start()


later: Callable[[float, Callable[[], None]], None] = by_timer
"""Runs something some seconds later. A process that has a receive loop sets it to the timers of that one, once: a rank
without memory, which often is why a collective is cut, may start a thread that does not come up."""


def _close(made: list[socket.socket]) -> None:
    for each in made:
        each.close()


def _end(connections: dict[int, socket.socket]) -> None:
    """End connections in both directions, for processes that have not been told to free their threads."""
    for inode, connection in connections.items():
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        _ending.pop(inode, None)


def _end_uncopied(connections: list[tuple[int, int]]) -> None:
    for number, inode in connections:
        _shut_down_itself(number, inode, socket.SHUT_RDWR)


def _is_tcp(any_socket: socket.socket) -> bool:
    return any_socket.family in (socket.AF_INET, socket.AF_INET6) and any_socket.type == socket.SOCK_STREAM


def _listens(copy: socket.socket, inode: int) -> bool:
    """Return whether a copy is of the socket with an inode, at which this process waits for connections of TCP."""
    listens = _is_tcp(copy) and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and os.fstat(copy.fileno()).st_ino == inode


def connected_to(address: str, port: int) -> set[tuple[int, int]]:
    """Return the TCP sockets of this process that are connected to an address and port, such as those to a store.

    Args:
        address: numeric, or the name of a host, whose address is not compared.
        port: the port of the server.
    """
    is_numeric = address.replace(".", "").isdecimal() or ":" in address
    sockets: set[tuple[int, int]] = set()
    for number, inode in open_sockets():
        try:
            with socket.socket(fileno=os.dup(number)) as copy:
                if _is_tcp(copy):
                    peer, found = copy.getpeername()[:2]
                    if found == port and (not is_numeric or str(peer).removeprefix("::ffff:") == address):
                        sockets.add((number, inode))
        except OSError:
            continue
    return sockets


def of_collectives(hosts: Sequence[str]) -> set[tuple[int, int]]:
    """Return TCP sockets that may belong to a process group that user code has created.

    They are connected to this machine or to another host of the mesh; connections to elsewhere are not.

    Args:
        hosts: addresses of the hosts of the mesh.
    """
    import psutil

    near = {str(entry[4][0]) for host in hosts if host for entry in socket.getaddrinfo(host, None)}
    near.update(each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses)
    sockets: set[tuple[int, int]] = set()
    for number, inode in open_sockets():
        try:
            with socket.socket(fileno=os.dup(number)) as copy:
                if _is_tcp(copy) and str(copy.getpeername()[0]).removeprefix("::ffff:").partition("%")[0] in near:
                    sockets.add((number, inode))
        except OSError:
            continue
    return sockets
