"""Counts what this test run has left behind: processes, threads, descriptors, shared memory, session folders."""

from __future__ import annotations

import gc
import os
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path

import state

MARKER = "MONARCH_TEST_RUN"
"""Environment variable that every descendant of this run inherits, and by which it is found."""
_ZYGOTES = ("monarch-zygote", "monarch-warming")
_SPARES = ("monarch-spare", "monarch-image")
"""Processes that are of one kind with these, but serve no session."""
_OPEN = "more open"
SOON = 15.0
"""Seconds for which something on its way out may still be seen."""

# Kept warm for the next message, and bounded; whether one is still in use is asked of the segments themselves.
_WARM = "/memfd:monarch"


def _kernel() -> str:
    """Return the parent of the threads of the kernel; empty in a container, which shows none."""
    try:
        return "2" if Path("/proc/2/comm").read_text().strip() == "kthreadd" else ""
    except OSError:
        return ""


_KERNEL = _kernel()


def mark_this_run() -> str:
    """Marks this process and its descendants to come, and gives them a runtime folder of their own."""
    os.environ[MARKER] = f"{os.getpid()}-{secrets.token_hex(4)}"
    folder = tempfile.mkdtemp(prefix="mk-", dir="/tmp")
    os.environ["XDG_RUNTIME_DIR"] = folder
    return folder


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(0.02, pause * 2)
    return True


def processes(marker: str | None = None) -> dict[int, str]:
    """Descendants of this run that live, by pid, and those that have ended and that one of them should have reaped.

    A zygote, its spares and its successors are one, whose pid is that of the first.
    """
    needle = f"{MARKER}={marker or os.environ[MARKER]}".encode()
    there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    _strangers.intersection_update(there)
    ours: dict[int, str] = {}
    zombies: dict[int, int] = {}
    alive: set[tuple[int, str]] = set()
    for pid in there - _strangers:
        if pid == os.getpid():
            continue
        try:
            name, _, rest = _line(f"/proc/{pid}/stat").decode().partition("(")[2].rpartition(")")
            words = rest.split()
            if words[0] in "ZX":
                zombies[pid] = int(words[1])
                continue
            if words[1] == _KERNEL:
                # Most processes of a small machine; these have no environment.
                _strangers.add(pid)
                continue
            # A pid is used again, but not with the same time of start.
            key = pid, words[19]
            alive.add(key)
            found = _environments.get(key)
            if found is None:
                environ = _read(f"/proc/{pid}/environ")
                found = _marker_in(environ)
                if environ:
                    # It is empty for a moment in an exec.
                    _environments[key] = found
                    if not found:
                        _strangers.add(pid)
            if found == needle:
                ours[_first_of(pid) if name in _ZYGOTES + _SPARES else pid] = name
        except (OSError, ValueError, IndexError):
            # Gone meanwhile, or of another user.
            continue
    for key in _environments.keys() - alive:
        _environments.pop(key, None)
    for pid, parent in zombies.items():
        if parent in ours or parent == os.getpid():
            ours[pid] = f"zombie of {parent}"
    return ours


_environments: dict[tuple[int, str], bytes] = {}
"""The marker that each living process inherited, by its pid and time of start: it is read once, which takes long."""
_strangers: set[int] = set()
"""Pids that had a process of no run of tests at each look since the first, and so still have: they are not read again.

Another process gets a pid only after all others have had their turn, which takes longer than from one look to the next.
"""


def _line(path: str) -> bytes:
    """Return a file of /proc that comes in one piece, by half the calls of ``_read``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        pieces = [os.read(fd, 65536)]
        while pieces[-1]:
            pieces.append(os.read(fd, 65536))
        return b"".join(pieces)
    finally:
        os.close(fd)


def _marker_in(environ: bytes) -> bytes:
    """The marker of a run with its name, in the environment of a process; empty if that has none."""
    return next((each for each in environ.split(b"\0") if each.startswith(f"{MARKER}=".encode())), b"")


def _first_of(zygote: int) -> int:
    """It is the leader of a session, which its successors stay in."""
    return os.getsid(zygote)


def zygotes(before: Container[int] = ()) -> list[int]:
    """Pids of the zygotes of this run and of their successors to be, but for those that ``processes`` gave before."""
    return pids_named(*_ZYGOTES, before=before)


def pids_named(*names: str, before: Container[int] = ()) -> list[int]:
    """Pids of the processes of this run that have one of these names, but for those that were before.

    A zygote's successor counts as the zygote, which is the leader of its session; a fork server leads none.
    """
    found: list[int] = []
    for entry in os.scandir("/proc"):
        with suppress(OSError, ValueError):
            name, ours = Path(entry.path, "comm").read_text().strip(), f"{MARKER}={os.environ[MARKER]}".encode()
            if (
                name in names
                and ours in Path(entry.path, "environ").read_bytes()
                and int(entry.name) not in before
                and os.getsid(int(entry.name)) not in before
            ):
                found.append(int(entry.name))
    return sorted(found)


def threads() -> dict[int, str]:
    """Threads of the library in this process, without those that end by themselves if nothing more comes for them."""
    idle = state.idle_threads()
    return {
        each.ident or 0: each.name
        for each in threading.enumerate()
        if each.name.startswith("monarch") and each.ident not in idle
    }


def descriptors() -> Counter[str]:
    """Open files of this process by what they are; not its reserve, which comes and goes with connections."""
    found: Counter[str] = Counter()
    wire = sys.modules.get("monarch._wire.descriptors")
    held = {str(fd) for fd in (wire.reserve._held if wire is not None else ())}
    for fd in set(os.listdir("/proc/self/fd")) - held:
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.startswith((_WARM, f"/proc/{os.getpid()}/fd")):
            found[target.partition(":[")[0]] += 1
    return found


def shared_memory() -> set[str]:
    """Named shared memory of this user."""
    found: set[str] = set()
    for entry in os.scandir("/dev/shm"):
        try:
            # Semaphores of multiprocessing are other programs'; nothing here makes any.
            if entry.stat().st_uid == os.getuid() and not entry.name.startswith("sem.mp-"):
                found.add(entry.name)
        except OSError:
            continue
    return found


def not_of_others(names: set[str]) -> set[str]:
    """Without the shared memory that processes hold which have nothing to do with this run."""
    if not names:
        return names
    ours = {os.getpid(), *processes()}
    rest = set(names)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) not in ours:
            try:
                maps = Path(entry.path, "maps").read_text()
                # Closed here if a descriptor is gone in the middle of it.
                with os.scandir(f"{entry.path}/fd") as opened:
                    maps += "".join(os.readlink(each.path) for each in opened)
            except OSError:
                continue
            rest = {name for name in rest if f"/dev/shm/{name}" not in maps}
    # What is gone by now was on its way out, or a thing of the moment.
    return rest & shared_memory()


def _below(folder: str, prefix: str) -> Iterator[str]:
    """Yield what is in a folder and below, without objects for paths, which take most of the time of a look."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, f"{prefix}{entry.name}/")


def session_folders() -> set[str]:
    """Session folders, of this run alone since it has a runtime folder of its own, with the sockets in them."""
    base = os.environ["XDG_RUNTIME_DIR"]
    while True:
        try:
            return set(_below(base, ""))
        except FileNotFoundError:
            # One was removed in the middle of this.
            continue


def live_segments() -> int:
    """Messages in shared memory of this process that somebody may still read."""
    from monarch._node.current import current_node, has_node

    return current_node().bulk.segments.stats().live if has_node() else 0


class Snapshot:
    """Processes, files and memory that exist at one moment."""

    def __init__(self) -> None:
        self.processes = processes()
        self.threads = threads()
        self.all_threads = {each.ident or 0 for each in threading.enumerate()}
        self.descriptors = descriptors()
        self.shared_memory = shared_memory()
        self.folders = session_folders()
        self.segments = live_segments()
        self.state = state.unsettled()

    def since(self, before: Snapshot) -> list[str]:
        """Return each thing that did not exist before, in words."""
        found = [f"process {pid} ({name})" for pid, name in self.processes.items() if pid not in before.processes]
        found += [f"thread {name}" for ident, name in self.threads.items() if ident not in before.threads]
        found += state.strange_threads(before.all_threads)
        more = self.descriptors - before.descriptors
        # Of anonymous things only the number counts, since one may have gone and another come.
        found += [f"{count} {_OPEN} {target}" for target, count in more.items()]
        found += [f"/dev/shm/{name}" for name in not_of_others(self.shared_memory - before.shared_memory)]
        found += [f"session file {name}" for name in sorted(self.folders - before.folders)]
        if self.segments > before.segments:
            found.append(f"{self.segments - before.segments} messages in shared memory")
        found += [each for each in self.state if each not in before.state]
        return found


class Kit:
    """Compares before and after."""

    def __init__(self) -> None:
        self.before = Snapshot()

    def rebase(self) -> None:
        """Treat all that exists now as if it existed before: tests are to share it."""
        self.before = Snapshot()

    def left(self, seconds: float = SOON, *, opened: bool = True) -> list[str]:
        """Return what a test has left behind, after some time to end by itself; ``opened`` includes descriptors."""
        found: list[str] = []

        def nothing() -> bool:
            found[:] = [what for what in Snapshot().since(self.before) if opened or _OPEN not in what]
            if any(_OPEN in what for what in found):
                # A mesh and its endpoints refer to each other, and threads may have held the mesh until now.
                gc.collect()
            return not found

        wait_until(nothing, seconds)
        return found


def sweep_as_the_next_program() -> None:
    """Remove folders of sessions without a process: a program killed with its agents may leave them to the next."""
    from monarch._procs.session_folder import sweep

    base = Path(os.environ["XDG_RUNTIME_DIR"], f"monarch-{os.getuid()}")
    with suppress(FileNotFoundError):
        sweep(base)
    # It goes with the last session.
    with suppress(OSError):
        base.rmdir()
