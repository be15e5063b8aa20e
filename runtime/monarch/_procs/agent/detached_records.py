"""Records of kept meshes: what another program of the same user needs to attach one.

A record is a file in the session folder of the agent that keeps the mesh, and is removed with it. It holds the key of
the mesh, so whoever can read it can do everything with the mesh: only its user can.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import stat
import time
from pathlib import Path

import msgspec

from monarch._core.text.durations import duration_text
from monarch._procs.session_folder import _base, is_alive, remove_folder  # pyright: ignore[reportPrivateUsage]
from monarch.exceptions import ArgumentError, DetachedMeshInUseError, MonarchError, NoDetachedMeshError

_PREFIX = "kept-"
_LONGEST = 60


class Record(msgspec.Struct):
    """What there is to know of a kept mesh."""

    name: str
    host: str
    """Id of the host that it is on: that of its agent."""
    address: str
    """Where its agent listens for a controller."""
    public: str
    secret: str
    """Its key pair, which both ends of the connection use."""
    pid: int
    start: int
    """Pid and start time of its agent."""
    created: float
    """Seconds since the epoch."""
    seconds: float
    """How long it lives without a controller."""
    user: int = 0
    """Pid of the program that has it attached; 0 if none does."""
    until: float = 0.0
    """When its lease ends, in seconds since the epoch; 0 while a program has it attached."""

    def alive(self) -> bool:
        """Whether its agent lives."""
        return is_alive(self.pid, self.start)

    def state(self) -> str:
        """How it stands, for people."""
        if not self.alive():
            return "gone: the process that kept it has died"
        if self.user:
            return f"in use by process {self.user}; lives {duration_text(self.seconds)} longer than that"
        left = duration_text(self.until - time.time())
        return f"free until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.until))}, for {left}"


def check_name(name: str) -> None:
    """ArgumentError if a kept mesh cannot have this name."""
    if not name.isidentifier() or not name.isascii() or len(name) > _LONGEST:
        raise ArgumentError(f"a kept mesh is named as a variable is, by at most {_LONGEST} letters, and not {name!r}")


def publish(folder: str, record: Record) -> None:
    """Writes the record of a new mesh, whose agent has this session folder.

    Raises:
        TakenError: another one lives that has its name.
    """
    base = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Of two that start at the same time with one name, one is the first.
        fcntl.flock(base, fcntl.LOCK_EX)
        for path in _paths(record.name):
            other = _peek(path)
            if other is None or other.alive():
                state = other.state() if other is not None else f"its record {path} cannot be read"
                raise DetachedMeshInUseError(
                    f"a mesh {record.name!r} is kept already ({state}); %mesh attach {record.name} or "
                    f"attach({record.name!r}) gets it back, %mesh down {record.name} or end({record.name!r}) ends it"
                )
        write(folder, record)
    finally:
        os.close(base)


def write(folder: str, record: Record) -> None:
    """Writes a record anew; who reads it meanwhile sees the old one or the new one."""
    path = Path(folder, _PREFIX + record.name)
    made = Path(folder, f"new-{secrets.token_hex(4)}")
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        out.write(msgspec.json.encode(record))
    os.replace(made, path)


def read(path: Path) -> Record:
    """The record in a file.

    Raises:
        NotKeptError: it is gone.
        MonarchError: others can read or have written it, or it is no record.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NoDetachedMeshError(f"there is no record {path}: {error.strerror}") from None
    with open(file, "rb") as opened:
        known = os.fstat(file)
        try:
            folder = os.stat(path.parent)
        except FileNotFoundError as error:
            # Its lease has just ended.
            raise NoDetachedMeshError(f"there is no record {path} any more: {error.strerror}") from None
        if not stat.S_ISREG(known.st_mode) or known.st_uid != os.getuid() or folder.st_uid != os.getuid():
            raise MonarchError(f"{path} is not a file of this user, so it is not used as the key of a mesh")
        if known.st_mode & 0o077 or folder.st_mode & 0o077:
            raise MonarchError(
                f"others can read {path} (its mode is {stat.S_IMODE(known.st_mode):o}, that of its folder "
                f"{stat.S_IMODE(folder.st_mode):o}), and who has read it can use the mesh; if nobody has, "
                f"chmod 600 the file and 700 the folder, else end its process"
            )
        try:
            return msgspec.json.decode(opened.read(), type=Record)
        except msgspec.DecodeError as error:
            raise MonarchError(f"{path} is no record of a kept mesh: {error}") from None


def find(name: str) -> Record:
    """The record of the kept mesh of a name. What is left of one that has died is removed.

    Raises:
        NotKeptError: there is none.
        MonarchError: it cannot be used: see ``read``.
    """
    check_name(name)
    gone = False
    for path in _paths(name):
        try:
            record = read(path)
        except NoDetachedMeshError:
            continue
        if record.alive():
            return record
        gone = True
        remove_folder(str(path.parent))
    others = ", ".join(record.name for record, _ in records() if record is not None and record.alive())
    what = "is gone: the process that kept it has died" if gone else "is not there"
    raise NoDetachedMeshError(f"the kept mesh {name!r} {what}; there are: {others or 'none'}")


def records() -> list[tuple[Record | None, str]]:
    """All kept meshes of this user, each with how it stands; None for one whose record cannot be used.

    What is left of those that have died is removed, so they are told of once.
    """
    found: list[tuple[Record | None, str]] = []
    for path in _paths("*"):
        try:
            record = read(path)
        except NoDetachedMeshError:
            continue
        except MonarchError as error:
            found.append((None, str(error)))
            continue
        found.append((record, record.state()))
        if not record.alive():
            remove_folder(str(path.parent))
    return found


def _paths(name: str) -> list[Path]:
    """The records of a name, those that were made first in front."""
    base = _base()
    found: list[tuple[float, Path]] = []
    # That of Path raises where a folder goes meanwhile.
    for path in glob.glob(os.path.join(glob.escape(str(base)), "s*", _PREFIX + name)):
        with contextlib.suppress(OSError):
            found.append((os.lstat(path).st_ctime, Path(path)))
    with contextlib.suppress(OSError):
        # Asking makes this folder, if nothing of this user runs.
        base.rmdir()
    return [path for _, path in sorted(found)]


def _peek(path: Path) -> Record | None:
    try:
        return read(path)
    except NoDetachedMeshError:
        return Record("", "", "", "", "", 0, 0, 0.0, 0.0)
    except MonarchError:
        return None
