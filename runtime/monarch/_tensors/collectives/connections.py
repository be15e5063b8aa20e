"""The TCP connections of collectives, closed to free a rank that waits in one.

Aborting a gloo group does not free a rank inside a collective (tried with torch 2.13); shutting down the sockets of the
group does, within milliseconds. They are found by comparing the open sockets before and after the group is created.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence


def open_sockets() -> set[tuple[int, int]]:
    """Return file descriptor and inode of each socket of this process, of any kind: checking the kind takes longer."""
    sockets: set[tuple[int, int]] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            about = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            # Closed meanwhile.
            continue
        if about.startswith("socket:["):
            sockets.add((int(name), int(about[8:-1])))
    return sockets


def shut_down(sockets: set[tuple[int, int]]) -> int:
    """Shut down TCP connections of this process in both directions, without closing their descriptors.

    Args:
        sockets: as from ``open_sockets``; other kinds than TCP are left alone.

    Returns:
        The number of connections.
    """
    count = 0
    for number, inode in sockets:
        try:
            # Its number may be another file's by now; the copy is of the file being checked.
            copy = os.dup(number)
        except OSError:
            continue
        try:
            if os.fstat(copy).st_ino != inode:
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as connection:
                if _is_tcp(connection):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:
            # Not connected, or no longer.
            continue
    return count


def _is_tcp(any_socket: socket.socket) -> bool:
    return any_socket.family in (socket.AF_INET, socket.AF_INET6) and any_socket.type == socket.SOCK_STREAM


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
