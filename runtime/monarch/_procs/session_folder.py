"""The folder of a session on one host: mode 0700, it holds the ipc sockets and nothing else of value."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from monarch._procs.os.orphans import end_orphans
from monarch._procs.os.posix import outlives, proc_start_time
from monarch._procs.os.shared_names import remove_names
from monarch._wire.descriptors import limit_of, reserve, used_by
from monarch._wire.links import IPC_PATH_LIMIT, Inbox, shut_path

_TEND, _TEND_CALM = 1.0, 5.0
"""Seconds between a process's checks of its folder, its socket file, and its room for connections; and while it has
very many free descriptors."""
_TOUCH = 3600.0
"""Seconds until files are marked as in use: cleaners of /tmp check their age."""
# Room for the longest name of a socket in the folder.
_NAME_ROOM = 30


def _places() -> list[str]:
    """Candidate folders for this user's sessions; short, because socket paths have a length limit."""
    wanted = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
    fit = [folder for folder in wanted if folder and len(folder) + 40 + _NAME_ROOM < IPC_PATH_LIMIT]
    return [folder for folder in dict.fromkeys(fit) if os.access(folder, os.W_OK)]


def _has_room(folder: str) -> bool:
    """Return whether a file can be created in a folder, according to its file system."""
    known = os.statvfs(folder)
    return known.f_bavail > 0 and (known.f_favail > 0 or not known.f_files)


def base_folder(places: Sequence[str] | None = None) -> Path:
    """Return the folder of this user's sessions, in the first usable place."""
    for folder in _places() if places is None else places:
        base = Path(folder) / f"monarch-{os.getuid()}"
        try:
            base.mkdir(mode=0o700)
        except FileExistsError:
            pass
        known = base.lstat()
        if known.st_uid == os.getuid() and not os.path.islink(base):
            base.chmod(0o700)
            return base
    return Path(tempfile.mkdtemp(prefix="monarch-"))


def base_folders() -> list[str]:
    """Return the existing folders of this user's sessions: a session is in another place if the first had no room."""
    found: list[str] = []
    for place in _places():
        base = os.path.join(place, f"monarch-{os.getuid()}")
        with suppress(OSError):
            known = os.lstat(base)
            if known.st_uid == os.getuid() and stat.S_ISDIR(known.st_mode):
                found.append(base)
    return found


def _with_room() -> list[str]:
    """Return the places with room; OSError if there are places and none has any."""
    places = _places()
    free = [folder for folder in places if _has_room(folder)]
    if places and not free:
        raise OSError(
            errno.ENOSPC,
            f"cannot create the session folder: no space left in {' or '.join(places)}; free some space "
            f"there, or set XDG_RUNTIME_DIR to a folder with a short path on a disk with free space",
        )
    return free


def make_folder() -> str:
    """Create a folder for the sockets of this process's session; leftovers of dead sessions are removed.

    Raises:
        OSError: no usable disk has room.
    """
    # The owner is part of its name, so that there is no moment without an owner.
    pid = os.getpid()
    name = f"s{secrets.token_hex(4)}-{pid}-{proc_start_time(pid)}"
    while True:
        try:
            base = base_folder(_with_room())
            end_orphans()
            sweep(base)
            folder = base / name
            folder.mkdir(mode=0o700)
            return str(folder)
        except FileNotFoundError:
            # Another session, the last one, has just ended and removed the common folder.
            continue


def restore_folder(folder: str) -> None:
    """Create a session's folder again if somebody has removed it.

    Raises:
        OSError: it cannot be created, or another user has put something in its place.
    """
    base = os.path.dirname(folder)
    # Of the folder for temporary files, which is there, save if somebody has removed even that.
    os.makedirs(os.path.dirname(base), 0o700, exist_ok=True)
    for path in (base, folder):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            known = os.lstat(path)
            if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid():
                raise PermissionError(f"{path} is not a folder owned by this user, so it cannot hold sockets") from None


class Residence:
    """Preserves the session's folder and the socket file of a process.

    Args:
        folder: the session's.
        inbox: that of this process.
        hold: whether to lock the folder, since cleaners that respect locks (systemd-tmpfiles) then leave it alone.
    """

    def __init__(self, folder: str, inbox: Inbox, hold: bool = False) -> None:
        self._folder = folder
        self.inbox = inbox
        self._hold = hold
        # Leader only, all of them.
        self._lock = -1
        self._touched = time.monotonic()
        self._complaint = ""
        self._take_lock()

    def tend(self) -> str:
        """Restore missing files; in the receiving thread.

        Returns:
            Return the latest problem, for people, or an empty string.
        """
        try:
            if not os.path.isdir(self._folder):
                restore_folder(self._folder)
                self._take_lock()
            takes = self.inbox.tend()
            complaint = "" if takes else f"{used_by()} of its {limit_of()} file descriptors are open, so it "
        except OSError as error:
            complaint = f"the session folder {self._folder} cannot be used ({error}), so it "
        if time.monotonic() - self._touched >= _TOUCH:
            self._touched = time.monotonic()
            self.inbox.touch()
            with suppress(OSError):
                os.utime(self._folder)
        before, self._complaint = self._complaint, complaint
        return complaint + "accepts no new connections" if complaint and not before else ""

    @property
    def pause(self) -> float:
        """Seconds until the next check."""
        return _TEND_CALM if reserve.is_calm and not self._complaint else _TEND

    def _take_lock(self) -> None:
        if not self._hold:
            return
        self.close()
        with suppress(OSError):
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def host_id(folder: str) -> str:
    """Return the host id of a session's folder."""
    return os.path.basename(folder).partition("-")[0]


def claim(folder: str) -> None:
    """Register this process as a user of a folder; it is not swept while a user is alive."""
    pid = os.getpid()
    Path(folder, f"pid-{pid}-{proc_start_time(pid)}").touch(mode=0o600)


def sweep(base: Path, patience: float = 0.0) -> None:
    """Remove the folders whose processes have all died, for example in a power failure.

    Args:
        base: the common folder.
        patience: seconds in which processes may die; a killed one closes its files some time before.
    """
    until = time.monotonic() + patience
    for folder in base.iterdir():
        try:
            claims = [path.name.split("-")[1:] for path in (folder, *folder.glob("pid-*-*"))]
        except FileNotFoundError:
            # Another process removes it; that must not keep this one from the others.
            continue
        if all(len(known) == 2 for known in claims) and not any(
            is_alive(int(pid), int(start)) and outlives(int(pid), int(start), max(0.0, until - time.monotonic()))
            for pid, start in claims
        ):
            _remove(str(folder))


def is_alive(pid: int, start: int) -> bool:
    """Return whether a process is still the same one, and not another with its pid."""
    return pid > 0 and proc_start_time(pid) == start


def is_deserted(folder: str) -> bool:
    """Return whether no process listens at a socket in a folder, as when an ``exec`` has replaced its controller."""
    try:
        return not any(map(_is_listened_at, Path(folder).iterdir()))
    except OSError:
        # Somebody removes it just now, or connections cannot be tried.
        return False


def _is_listened_at(path: Path) -> bool:
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(0)
        # EAGAIN is that of a listener with a full queue.
        return trial.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def remove_folder(folder: str) -> None:
    """Remove a session's folder, and the common folder with the last one."""
    _remove(folder)
    try:
        os.rmdir(os.path.dirname(folder))
    except OSError:
        pass


def _remove(folder: str) -> None:
    """Remove a folder, with leftover shared memory of ranks."""
    with suppress(FileNotFoundError):
        # Another process may remove the same folder.
        remove_names(folder)
    shutil.rmtree(folder, ignore_errors=True)


def ipc_address(folder: str, proc: str) -> str:
    """Return where a proc of this host listens."""
    return f"ipc://{folder}/{proc.partition('/')[2]}"


def remove_socket(folder: str, proc: str) -> None:
    """Remove a proc's socket file; ZeroMQ leaves it, and dead processes cannot remove theirs."""
    path = ipc_address(folder, proc).removeprefix("ipc://")
    for each in (path, shut_path(path)):
        with suppress(OSError):
            os.unlink(each)


def host_of(proc: str) -> str:
    """Return the host id in a proc id."""
    return proc.partition("/")[0]


def program_folders(file: str) -> list[tuple[str, int]]:
    """Return the session folders of this user's living programs that have a file, each with the pid; oldest first."""
    found: list[tuple[float, str, int]] = []
    for base in base_folders():
        with suppress(OSError):
            for name in os.listdir(base):
                _, _, owner = name.partition("-")
                pid, _, start = owner.partition("-")
                if pid.isdigit() and start.isdigit() and is_alive(int(pid), int(start)):
                    with suppress(OSError):
                        found.append((os.lstat(os.path.join(base, name, file)).st_ctime, f"{base}/{name}", int(pid)))
    return [(folder, pid) for _, folder, pid in sorted(found)]
