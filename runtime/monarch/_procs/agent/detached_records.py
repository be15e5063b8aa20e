"""Records of detached meshes: what another program of the same user needs to attach one.

A record is a file in the session folder of the mesh's agent, and is removed with it. It holds the key of the mesh, so
whoever can read it has full control of the mesh: only its user can.
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
from monarch._procs.session_folder import base_folders, is_alive, remove_folder
from monarch.exceptions import ArgumentError, DetachedMeshInUseError, MonarchError, NoDetachedMeshError

_PREFIX = "detached-"
_LONGEST = 60
_LOCK_S = 10.0
"""Seconds to wait for other programs of this user that start."""


class RecordedHost(msgspec.Struct):
    """A host of a detached mesh."""

    id: str
    name: str
    """For messages; empty for this machine."""
    address: str
    """Where its agent listens for a controller."""


class Record(msgspec.Struct):
    """The record of a detached mesh."""

    name: str
    hosts: list[RecordedHost]
    public: str
    secret: str
    """Its key pair, used at both ends of the connections."""
    pid: int
    start: int
    """Pid and start time of its agent, or of the process that holds its hosts."""
    created: float
    """Seconds since the epoch."""
    seconds: float
    """Lifetime in seconds without a controller."""
    user: int = 0
    """Pid of the attached program; 0 if none."""
    until: float = 0.0
    """End of its lease, in seconds since the epoch; 0 while a program is attached."""
    holder: str = ""
    """The socket of the process that holds its hosts; empty if it has an agent on this machine."""

    @property
    def keeper(self) -> str:
        """The process that keeps it, for messages."""
        return "the process that holds its hosts" if self.holder else "its agent"

    def alive(self) -> bool:
        """Return whether its agent, or the process that holds its hosts, is alive."""
        return is_alive(self.pid, self.start)

    def state(self) -> str:
        """Describe its state for people."""
        if not self.alive():
            return f"gone: {self.keeper} has died"
        if self.user:
            return f"in use by process {self.user}; lease of {duration_text(self.seconds)} after that"
        left = duration_text(self.until - time.time())
        return f"free until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.until))}, for {left}"


_LAST = 1e11
"""The latest end of a lease, in seconds since the epoch: dates beyond cannot be shown."""


def check_name(name: str) -> None:
    """Raise ArgumentError for an invalid name of a detached mesh."""
    if not name.isidentifier() or not name.isascii() or len(name) > _LONGEST:
        raise ArgumentError(f"invalid mesh name {name!r}: must be a Python identifier of at most {_LONGEST} characters")


def publish(folder: str, record: Record) -> None:
    """Write the record of a new mesh, whose agent has this session folder.

    Raises:
        DetachedMeshInUseError: a live mesh has this name.
        MonarchError: another process holds the lock of the common folder.
    """
    base = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # If two start at the same time with one name, one is first.
        _take(base, os.path.dirname(folder))
        for path in _paths(record.name):
            other = _peek(path)
            if other is None or other.alive():
                state = other.state() if other is not None else f"its record {path} cannot be read"
                raise DetachedMeshInUseError(
                    f"a detached mesh {record.name!r} already exists ({state}); %mesh attach {record.name} or "
                    f"attach({record.name!r}) attaches it, %mesh down {record.name} or end({record.name!r}) ends it"
                )
        write(folder, record)
    finally:
        os.close(base)


def _take(base: int, path: str) -> None:
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(base, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise MonarchError(
                    f"another process has held the lock of {path} for {_LOCK_S:g} s, so no mesh can be detached "
                    f"meanwhile; 'fuser -v {path}' shows which process"
                ) from None
            time.sleep(0.01)


def write(folder: str, record: Record) -> None:
    """Replace a record; readers see the old one or the new one."""
    path = Path(folder, _PREFIX + record.name)
    made = Path(folder, f"new-{secrets.token_hex(4)}")
    try:
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
            out.write(msgspec.json.encode(record))
        os.replace(made, path)
    except OSError:
        made.unlink(missing_ok=True)
        raise


def read(path: Path) -> Record:
    """Read the record in a file.

    Raises:
        NoDetachedMeshError: it is gone.
        MonarchError: other users can read it or have written it, or it is not a record.
    """
    try:
        # A pipe of this name would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NoDetachedMeshError(f"no record at {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise MonarchError(f"{path} is not a record of a detached mesh: it is not a regular file")
    with open(file, "rb") as opened:
        known = os.fstat(file)
        try:
            folder = os.stat(path.parent)
        except FileNotFoundError as error:
            # Its lease has just ended.
            raise NoDetachedMeshError(f"record {path} is gone: {error.strerror}") from None
        if not stat.S_ISREG(known.st_mode) or known.st_uid != os.getuid() or folder.st_uid != os.getuid():
            raise MonarchError(f"record {path} belongs to another user, so its key is not trusted")
        if known.st_mode & 0o077 or folder.st_mode & 0o077:
            raise MonarchError(
                f"record {path} is readable by other users (mode {stat.S_IMODE(known.st_mode):o}, folder "
                f"{stat.S_IMODE(folder.st_mode):o}), and its key gives access to the mesh; if no other user "
                f"has read it, chmod 600 the file and 700 the folder; otherwise end its process"
            )
        try:
            record = msgspec.json.decode(opened.read(), type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MonarchError(f"{path} is not a record of a detached mesh: {error}") from None
        if not 0 <= record.until < _LAST or not (record.holder or len(record.hosts) == 1):
            raise MonarchError(f"{path} is not a record of a detached mesh: its time or its hosts are invalid")
        return record


def find(name: str) -> Record:
    """Return the record of the detached mesh of a name. Leftovers of a dead one are removed.

    Raises:
        NoDetachedMeshError: no detached mesh has this name.
        MonarchError: it cannot be used; see ``read``.
    """
    check_name(name)
    gone = ""
    for path in _paths(name):
        try:
            record = read(path)
        except NoDetachedMeshError:
            continue
        if record.alive():
            return record
        gone = record.state()
        remove_folder(str(path.parent))
    others = ", ".join(record.name for record, _ in records() if record is not None and record.alive())
    what = f"is {gone}" if gone else "does not exist"
    raise NoDetachedMeshError(f"detached mesh {name!r} {what}; detached meshes: {others or 'none'}")


def records() -> list[tuple[Record | None, str]]:
    """Return all detached meshes of this user, each with its state; None for one whose record cannot be used.

    Leftovers of dead ones are removed, so they are reported once.
    """
    entries: list[tuple[Record | None, str]] = []
    for path in _paths("*"):
        try:
            record = read(path)
        except NoDetachedMeshError:
            continue
        except MonarchError as error:
            entries.append((None, str(error)))
            continue
        entries.append((record, record.state()))
        if not record.alive():
            remove_folder(str(path.parent))
    return entries


def _paths(name: str) -> list[Path]:
    """Return the records of a name, oldest first."""
    found: list[tuple[float, Path]] = []
    for base in base_folders():
        # Path's own version raises if a folder goes meanwhile.
        for path in glob.glob(os.path.join(glob.escape(base), "s*", _PREFIX + name)):
            with contextlib.suppress(OSError):
                found.append((os.lstat(path).st_ctime, Path(path)))
    return [path for _, path in sorted(found)]


def _peek(path: Path) -> Record | None:
    try:
        return read(path)
    except NoDetachedMeshError:
        return Record("", [], "", "", 0, 0, 0.0, 0.0)
    except MonarchError:
        return None
