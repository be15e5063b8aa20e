"""From a fork of the zygote to a rank process: everything between ``fork()`` and the rank's entry point."""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn, cast

import msgspec

from monarch._procs.os import posix
from monarch._procs.os.orphans import mark_rank
from monarch._procs.rank.text_streams import standard_text
from monarch._procs.zygote.own_folders import OWN_FOLDERS, with_own_folders

# The fork that makes a rank ends right after it; this only bounds the wait in case it was suspended.
_RELEASE_TIMEOUT = 600.0


class RankSpec(msgspec.Struct):
    """The specification of one rank."""

    env: dict[str, str | None]
    """Changes to the zygote's environment; None removes a variable."""
    affinity: list[int] | None
    """The cores it may run on; None for any."""
    threads: int | None
    """Number of compute threads; None leaves it to torch. OMP_NUM_THREADS, if set, wins."""
    config: bytes
    """The argument of its entry point."""
    title: str
    """Name in ``ps`` and ``top``; 15 bytes at most."""
    path: list[str]
    """``sys.path``; if empty, that of the zygote."""
    cwd: str
    """Working folder; a missing one is ignored."""
    leads: bool = False
    """Whether it leads a session of its own, not only a group."""


class ForkOrigin(msgspec.Struct):
    """The origin of a new fork."""

    agent: int
    """Pid of the host agent, its future parent."""
    fork_helper: int
    """Pid of the fork helper, which ends when all ranks of the request are there."""
    release: int
    """Read end of a pipe: one byte for each rank once the agent knows all of them."""


def run_rank(origin: ForkOrigin, spec: RankSpec, entry: str, stdout: int, stderr: int) -> NoReturn:
    """Become a rank, run its entry point, and end the process; never returns into the caller's code."""
    status = 1
    try:
        _leave_zygote(stdout, stderr, keep=origin.release, leads=spec.leads)
        mark_rank()
        status = _run(origin, spec, entry)
    except BaseException as error:
        status = _status_of(error)
    finally:
        # Nothing may run between here and the end: the frames below are the zygote's.
        for flush in (sys.stdout.flush, sys.stderr.flush, posix.flush_c_stdio):
            try:
                flush()
            except BaseException:
                pass
        os._exit(status)


def _run(origin: ForkOrigin, spec: RankSpec, entry: str) -> int:
    # torch may start threads during setup.
    posix.hold_parent_signal()
    _set_up(spec)
    function = find_entry(entry)
    if not posix.await_new_parent(origin.fork_helper, _RELEASE_TIMEOUT) or not os.read(origin.release, 1):
        # The agent does not know this rank, so nothing would ever end it.
        return 1
    os.close(origin.release)
    posix.set_pdeathsig(signal.SIGKILL)
    # The signal works from this call on, so check after it for an agent that was dead by then.
    if os.getppid() != origin.agent:
        print(f"the host agent (pid {origin.agent}) is not the parent of this rank; exiting", file=sys.stderr)
        return 1
    result = function(spec.config)
    return 0 if result is None else int(result) & 0xFF


def find_entry(entry: str) -> Callable[[bytes], int | None]:
    """Import the function that ``module:function`` names.

    Raises:
        ImportError: it does not exist; the text has the name.
    """
    module_name, colon, name = entry.partition(":")
    if not colon or not module_name or not name:
        raise ImportError(f"rank entry point: expected 'module:function', got {entry!r}")
    try:
        function: Any = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ImportError(f"cannot import rank entry point {entry!r}: {error}") from error
    if not callable(function):
        raise ImportError(f"rank entry point {entry!r}: expected a function, got {function!r}")
    return cast(Callable[[bytes], "int | None"], function)


def _leave_zygote(stdout: int, stderr: int, keep: int, leads: bool) -> None:
    """Share nothing but memory with the zygote: reset group, signals, descriptors, streams."""
    if leads:
        os.setsid()
    else:
        os.setpgid(0, 0)
    default_signals()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target, inheritable=True)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = sys.__stdin__ = os.fdopen(0, "r", 1, "utf-8", "backslashreplace", closefd=False)
    sys.stdout = sys.__stdout__ = standard_text(1)
    sys.stderr = sys.__stderr__ = standard_text(2)
    posix.unbuffer_c_stdout()


def default_signals() -> None:
    """Reset each signal to its state in a fresh Python process."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        # Python ignores SIGPIPE and SIGXFSZ, so that the calls fail instead.
        if handler not in (signal.SIG_DFL, None) and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _set_up(spec: RankSpec) -> None:
    for key, value in spec.env.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    if "TZ" in spec.env:
        time.tzset()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [""]
    if spec.path:
        for new in set(spec.path).difference(sys.path):
            # The zygote may have checked when there was nothing.
            sys.path_importer_cache.pop(new, None)
        sys.path[:] = with_own_folders(spec.path, sys.path, os.environ.get(OWN_FOLDERS, ""))
    try:
        os.chdir(spec.cwd)
    except OSError:
        pass
    _reseed()
    if spec.affinity:
        try:
            os.sched_setaffinity(0, spec.affinity)
        except OSError as error:
            # Cores come and go with the limits of a container: slower, but no reason not to run.
            print(f"cannot bind this rank to cores {spec.affinity}: {error}", file=sys.stderr)
    _set_threads(spec.threads)
    posix.set_comm(spec.title)
    gc.enable()


def _reseed() -> None:
    """Give this rank random numbers of its own, as in a fresh process; CUDA seeds its generators at first use."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _set_threads(threads: int | None) -> None:
    wish = os.environ.get("OMP_NUM_THREADS")
    if wish is None and threads is not None:
        # For later imports and for subprocesses.
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif wish is not None:
        # A list has one number for each level of nesting.
        first = wish.partition(",")[0].strip()
        threads = int(first) if first.isdecimal() and int(first) else threads
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _status_of(error: BaseException) -> int:
    """Return the exit status that Python would give; print the error to stderr as Python would."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        # It begins with user code, if any of that ran.
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        pass
    return 1
