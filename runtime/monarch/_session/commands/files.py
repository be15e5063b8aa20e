"""Files of ranks, in pieces: read where they are, or written there."""

from __future__ import annotations

import glob
import os
import re
import stat
from typing import NamedTuple

from monarch._node.current import current_node
from monarch._node.services.once import is_first
from monarch._node.services.registry import service

_WILD = re.compile(r"[*?[]")
"""The first of it begins the part of a pattern that matches differ in."""


class Found(NamedTuple):
    """A file of a rank.

    Attributes:
        host: the same for all ranks of a host.
        path: absolute, without symbolic links.
        name: its path from the folder that contains what was asked for; of a pattern, that of its first wildcard.
        size: in bytes.
    """

    host: str
    path: str
    name: str
    size: int


@service("files.find_files", "threaded")
def find_files(pattern: str, values: dict[str, int]) -> list[Found]:
    """Return the files of a path, a folder or a pattern such as ``*.pt``, in the working directory of this rank.

    Args:
        pattern: may begin with ``~``, and contain names in braces.
        values: the values of the names, such as ``rank``.
    """
    path = os.path.expanduser(filled(pattern, values))
    # A file with a name such as "a[1].pt" is no pattern.
    tops = [path] if os.path.exists(path) else sorted(glob.glob(path))
    # Matches in different folders may have the same name.
    wild = None if tops == [path] else _WILD.search(path)
    base = os.path.dirname(os.path.abspath(path) if wild is None else os.path.abspath(path[: wild.start()] + "x"))
    found: list[Found] = []
    for top in tops:
        if not os.path.isdir(top):
            found += _found(top, _below(top, base))
            continue
        for here, folders, names in os.walk(top):
            folders.sort()
            for name in sorted(names):
                inside = os.path.join(here, name)
                found += _found(inside, _below(inside, base))
    return found


def _below(path: str, base: str) -> str:
    """Return a path relative to a folder; the name of what is not below it."""
    name = os.path.relpath(path, base)
    return os.path.basename(path) if name.startswith(os.pardir + os.sep) else name


def filled(pattern: str, values: dict[str, int]) -> str:
    """Return a path with the values of its names in braces; other braces stay."""
    for name, value in values.items():
        pattern = pattern.replace("{" + name + "}", str(value))
    return pattern


def _found(path: str, name: str) -> list[Found]:
    try:
        known = os.stat(path)
    except OSError:
        return []
    if not stat.S_ISREG(known.st_mode):
        # A pipe or a device has no end.
        return []
    return [Found(current_node().folder, os.path.realpath(path), name, known.st_size)]


@service("files.read_piece", "threaded")
def read_piece(path: str, offset: int, size: int) -> bytes:
    """Return a piece of a file; less than asked for at its end."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


@service("files.host_here", "quick")
def host_here() -> str:
    """Return the same text on all ranks of a host."""
    return current_node().folder


@service("files.write_piece", "threaded")
def write_piece(path: str, offset: int, data: bytes, last: bool, key: str) -> str:
    """Write a piece of a file, which has its name once the last piece is written; return its absolute path.

    The others may come in any order. All may come twice: one that came first counts.

    Args:
        path: in the working directory of this rank; may begin with ``~``.
        offset: in the file, in bytes.
        data: the piece.
        last: whether the file ends with it.
        key: the key of the request.
    """
    target = os.path.abspath(os.path.expanduser(path))
    if not is_first(key):
        return target
    os.makedirs(os.path.dirname(target), exist_ok=True)
    part = f"{target}.part"
    with open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
        file.seek(offset)
        file.write(data)
        if last:
            # An interrupted copy may have left a longer file behind.
            file.truncate()
    if last:
        os.replace(part, target)
    return target
