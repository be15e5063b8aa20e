"""The folder of a session on one host: mode 0700, it holds the ipc sockets and nothing else of worth."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from monarch._procs.orphans import end_orphans
from monarch._procs.posix import proc_start_time
from monarch._wire.links import IPC_PATH_LIMIT

# Room for the longest name of a socket in the folder.
_NAME_ROOM = 30


def _base() -> Path:
    """The folder of this user's sessions; short, because the path of a socket may not be long."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if folder and os.access(folder, os.W_OK) and len(folder) + 40 + _NAME_ROOM < IPC_PATH_LIMIT:
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


def make_folder() -> str:
    """A new folder for the sockets of this process's session; what sessions that have died have left is removed."""
    # Whose it is stands in its name, so that there is no moment at which it is nobody's.
    pid = os.getpid()
    name = f"s{secrets.token_hex(4)}-{pid}-{proc_start_time(pid)}"
    while True:
        try:
            base = _base()
            end_orphans(spare_trackers=True)
            sweep(base)
            folder = base / name
            folder.mkdir(mode=0o700)
            return str(folder)
        except FileNotFoundError:
            # The last session of others has just ended, and removed the common folder.
            continue


def host_id(folder: str) -> str:
    """The id of the host that a session's folder is of."""
    return os.path.basename(folder).partition("-")[0]


def claim(folder: str) -> None:
    """Says that this process uses a folder; it is not swept while one that does is alive."""
    pid = os.getpid()
    Path(folder, f"pid-{pid}-{proc_start_time(pid)}").touch(mode=0o600)


def sweep(base: Path) -> None:
    """Removes the folders whose processes have all died, as after a loss of power."""
    for folder in base.iterdir():
        claims = [path.name.split("-")[1:] for path in (folder, *folder.glob("pid-*-*"))]
        if all(len(known) == 2 for known in claims) and not any(
            is_alive(int(pid), int(start)) for pid, start in claims
        ):
            shutil.rmtree(folder, ignore_errors=True)


def is_alive(pid: int, start: int) -> bool:
    """Whether a process is still the one that it was, and no other with its number."""
    return pid > 0 and proc_start_time(pid) == start


def remove_folder(folder: str) -> None:
    """Removes a session's folder, and that of all sessions if it is the last."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.rmdir(os.path.dirname(folder))
    except OSError:
        pass


def ipc_address(folder: str, proc: str) -> str:
    """Where a proc of this host listens."""
    return f"ipc://{folder}/{proc.partition('/')[2]}"


def remove_socket(folder: str, proc: str) -> None:
    """Removes the file that a proc listened on; ZeroMQ leaves it, and the dead cannot remove theirs."""
    try:
        os.unlink(ipc_address(folder, proc).removeprefix("ipc://"))
    except OSError:
        pass


def host_of(proc: str) -> str:
    """The host id in a proc id."""
    return proc.partition("/")[0]
