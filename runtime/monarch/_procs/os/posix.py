"""Linux functions that the standard library lacks: thin wrappers, one call each."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
# The kernel assigns the new parent before it sends the signal, so it can come late: use one that is ignored by default.
_PARENT_DIED = signal.SIGURG

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
# Without the GIL: fd 1 may be a pipe that another thread of this process has to drain.
_fflush = _libc.fflush
_fflush.argtypes = [ctypes.c_void_p]
# With the GIL: it only reads a field, and releasing the GIL could cost a switch interval.
_fpending = ctypes.PyDLL(None)["__fpending"]
_fpending.argtypes = [ctypes.c_void_p]
_fpending.restype = ctypes.c_size_t
_tgkill = getattr(_libc, "tgkill", None)
"""Not in every C library, such as older ones of glibc."""
_C_STREAMS = [ctypes.c_void_p.in_dll(_libc, name) for name in ("stdout", "stderr")]
_STDOUT = _C_STREAMS[0]
_IONBF = 2


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process.

    With ``os.kill`` any thread may take it. If another one does, the main thread sleeps on: Python runs its handlers in
    the main thread only.

    Raises:
        OSError: the process is gone, or belongs to another user.
    """
    if _tgkill is None:
        os.kill(pid, number)
    else:
        _check(_tgkill(pid, pid, number))


def set_pdeathsig(number: int) -> None:
    """Have the kernel send this process the signal ``number`` when its parent dies; 0 for none."""
    _check(_prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def set_child_subreaper(on: bool = True) -> None:
    """Become the parent of every descendant whose own parent dies."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0))


def hold_parent_signal() -> None:
    """Call this before ``await_new_parent`` if there may be threads by then: any of them would take its signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {_PARENT_DIED})


def await_new_parent(parent: int, timeout: float) -> bool:
    """Wait until the process ``parent`` has died and this one has another parent.

    A parent's files are closed a moment before its children are reparented, so the end of a pipe is not enough; the
    signal at the parent's death comes right after. Clears the signal of ``set_pdeathsig``. For single-threaded
    processes only; for others, see ``hold_parent_signal``.

    Returns:
        False if ``parent`` still is the parent after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    hold_parent_signal()
    set_pdeathsig(_PARENT_DIED)
    while os.getppid() == parent:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or signal.sigtimedwait({_PARENT_DIED}, remaining) is None:
            break
    set_pdeathsig(0)
    # Ignoring a signal drops a pending one: the parent may have died just before the loop.
    handler = signal.signal(_PARENT_DIED, signal.SIG_IGN)
    signal.signal(_PARENT_DIED, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_PARENT_DIED})
    return os.getppid() != parent


def memfd(name: str) -> int:
    """Return a file in memory without a name; several writers append and do not overwrite each other."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the memory of a range of a file; its size stays, and whole pages of that range read as zeros."""
    _check(_fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length))


def flush_c_stdio() -> None:
    """Write out what C code has printed to stdout and stderr.

    Not ``fflush(NULL)``: that waits for the lock of every stream, including one that a thread reads from.
    """
    for stream in _C_STREAMS:
        if _fpending(stream):
            _fflush(stream)


def c_stdio_holds() -> bool:
    """Return whether C code has buffered output for stdout or stderr."""
    return any(map(_fpending, _C_STREAMS))


def unbuffer_c_stdout() -> None:
    """Make C's stdout unbuffered, so that replies of a rank need not check it."""
    _libc.setvbuf(_STDOUT, None, _IONBF, ctypes.c_size_t(0))


def release_free_memory() -> None:
    """Return memory that C's allocator caches to the system."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def set_comm(title: str) -> None:
    """Name this process, as ``ps`` and ``top`` show it; the kernel keeps the first 15 bytes."""
    fd = os.open("/proc/self/comm", os.O_WRONLY)
    try:
        os.write(fd, title.encode())
    finally:
        os.close(fd)


def umask() -> int:
    """Return the umask of this process; ``os.umask`` would change it for a moment."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def thread_count() -> int:
    """Return the number of threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def proc_start_time(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot: together with its pid, a unique name.

    Returns:
        None if the process does not exist, or has ended and awaits reaping.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the title in parentheses, which may contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def outlives(pid: int, start_time: int, timeout: float) -> bool:
    """Return whether the process ``pid`` that started at ``start_time`` is still alive after ``timeout`` seconds.

    Returns immediately if it is dead, and as soon as it dies.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        # No such process, or a kernel older than 5.3: use its current state.
        return proc_start_time(pid) == start_time
    try:
        if proc_start_time(pid) != start_time:
            return False
        waiter = select.poll()
        waiter.register(handle, select.POLLIN)
        return not waiter.poll(timeout * 1000)
    finally:
        os.close(handle)


def allow_reading_by(pid: int) -> None:
    """Allow a process and its descendants to read the memory of this one, where the kernel requires permission."""
    # EINVAL elsewhere.
    _prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
