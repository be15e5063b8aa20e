"""Versioned folders: a complete version appears in one step, and a crash leaves older ones unchanged.

A folder has ``v000001``, ``v000002`` and so on, and a small file ``latest`` with the name of one of them. A version is
written under another name, which readers ignore, and renamed when all of it is on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import threading
from pathlib import Path

from monarch.exceptions import ArgumentError, DeviceMeshError

_NAME = re.compile(r"v\d{6,}")
_LEFT = re.compile(r"v\d{6,}\.[0-9a-f]+\.(writing|removing)|latest\.[0-9a-f]+")
"""Prefix of unfinished attempts."""
_COMPLETE = ".metadata"
"""The last file written to a version."""
_LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def versions_in(path: str) -> list[str]:
    """Return the names of the complete versions in a folder, oldest first."""
    try:
        names = [name for name in os.listdir(path) if _NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((name for name in names if is_complete(os.path.join(path, name))), key=_number)


def is_complete(folder: str) -> bool:
    """Return whether a folder has a complete version."""
    return os.path.exists(os.path.join(folder, _COMPLETE))


def find_version(path: str, version: str | int | None = None) -> str:
    """Return the path of a complete version: a given one, or the latest.

    Args:
        path: the folder.
        version: its name or number; None for the latest.

    Raises:
        ArgumentError: the folder or version does not exist; it lists the existing ones.
    """
    complete = versions_in(path)
    if not complete:
        what = "has no complete version" if os.path.isdir(path) else "is not a folder on this host"
        raise ArgumentError(f"no checkpoint to restore: {path} {what}")
    if version is None:
        named = _read_latest(path)
        # The file may be missing or outdated while the versions are fine.
        return os.path.join(path, named if named in complete else complete[-1])
    name = _name(version) if isinstance(version, int) else version
    if name not in complete:
        raise ArgumentError(f"{path} has no complete version {name!r}; it has {', '.join(complete)}")
    return os.path.join(path, name)


class NewVersion:
    """A version that is being written. Other writers to the folder are locked out until it ends.

    Args:
        path: the folder, created if missing.
        token: hexadecimal digits, unique to this attempt.

    Raises:
        DeviceMeshError: another process is writing a version there.
        OSError: the folder cannot be written.
    """

    def __init__(self, path: str, token: str) -> None:
        self._path = path
        self._token = token
        self._turn = threading.Lock()
        self._ended = False
        os.makedirs(path, exist_ok=True)
        self._lock, alone = _lock(path)
        try:
            if alone:
                _clean(path)
            numbers = [_number(name) for name in os.listdir(path) if _NAME.fullmatch(name)]
            self.name = _name(max(numbers, default=0) + 1)
            self.folder = os.path.join(path, f"{self.name}.{token}.writing")
            """The folder for its files."""
            os.mkdir(self.folder)
        except BaseException:
            os.close(self._lock)
            raise

    def commit(self, keep: int) -> str:
        """Publish it as the latest version, once all files are on disk.

        Args:
            keep: how many versions to keep; the oldest are removed.

        Returns:
            Its path.

        Raises:
            DeviceMeshError: it was abandoned meanwhile.
        """
        with self._turn:
            if self._ended:
                raise DeviceMeshError(f"version {self.name} of {self._path} was abandoned before it was complete")
            done = os.path.join(self._path, self.name)
            _sync(self.folder)
            os.rename(self.folder, done)
            _sync(self._path)
            self._write_latest()
            for name in versions_in(self._path)[:-keep]:
                self._remove(name)
            self._end()
            return done

    def abandon(self) -> None:
        """Abandon it: remove the files written so far, unless it is complete already."""
        with self._turn:
            if not self._ended:
                shutil.rmtree(self.folder, ignore_errors=True)
                self._end()

    def _write_latest(self) -> None:
        new = os.path.join(self._path, f"latest.{self._token}")
        with open(new, "w", encoding="utf-8") as file:
            file.write(f"{self.name}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, os.path.join(self._path, "latest"))
        _sync(self._path)

    def _remove(self, name: str) -> None:
        # Under its own name it would count as a version until its last file is gone.
        going = os.path.join(self._path, f"{name}.{self._token}.removing")
        os.rename(os.path.join(self._path, name), going)
        shutil.rmtree(going, ignore_errors=True)

    def _end(self) -> None:
        self._ended = True
        # A child forked meanwhile has a copy of the descriptor.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        except OSError:
            pass
        os.close(self._lock)


def _lock(path: str) -> tuple[int, bool]:
    """Lock the folder, if its file system supports locks; return the descriptor, and whether it is locked."""
    lock = os.open(os.path.join(path, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} of {os.uname().nodename}\n".encode(), 0)
        return lock, True
    except BlockingIOError:
        who = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise DeviceMeshError(
            f"{who} is writing a checkpoint to {path}; wait until it is complete, or use another folder"
        ) from None
    except OSError as error:
        if error.errno in _LOCKLESS:
            return lock, False
        if error.errno in _FULL:
            # It is locked, without a note of its owner. The writer of the files tells how much room they need.
            return lock, True
        os.close(lock)
        raise


def _clean(path: str) -> None:
    for name in os.listdir(path):
        if _LEFT.fullmatch(name):
            left = Path(path, name)
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _read_latest(path: str) -> str:
    try:
        return Path(path, "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot, and need not.
        if error.errno not in (errno.EINVAL, *_LOCKLESS):
            raise
    finally:
        os.close(descriptor)


def _name(number: int) -> str:
    return f"v{number:06}"


def _number(name: str) -> int:
    return int(name[1:])
