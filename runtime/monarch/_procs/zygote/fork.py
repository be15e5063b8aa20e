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
from monarch._procs.rank.text_streams import rank_text

# The fork that makes a rank ends right after it; this only bounds the wait where somebody has stopped it.
_RELEASE_TIMEOUT = 600.0


class RankSpec(msgspec.Struct):
    """What one rank is to be like."""

    env: dict[str, str | None]
    """Changes to the environment that the zygote was started with; None removes a variable."""
    affinity: list[int] | None
    """The cores it may run on; None for any."""
    threads: int | None
    """How many threads it computes with; None leaves that to torch. OMP_NUM_THREADS, where set, wins."""
    config: bytes
    """The argument of its entry point."""
    title: str
    """What ``ps`` and ``top`` show; 15 bytes at most."""
    path: list[str]
    """``sys.path``; none leaves it as it is in the zygote."""
    cwd: str
    """Working folder; one that is gone is ignored."""
    leads: bool = False
    """Whether it is of a session of its own, and not only of a group."""


class Birth(msgspec.Struct):
    """What a new fork knows of where it comes from."""

    agent: int
    """Pid of the host agent, which becomes its parent."""
    fork_helper: int
    """Pid of the process that forked it, and ends when all ranks of the request are there."""
    release: int
    """Read end of a pipe: one byte for each rank once the agent has been told of all of them."""


def run_rank(birth: Birth, spec: RankSpec, entry: str, stdout: int, stderr: int) -> NoReturn:
    """Become a rank, run its entry point, and end the process; never returns into the caller's code."""
    status = 1
    try:
        _leave_zygote(stdout, stderr, keep=birth.release, leads=spec.leads)
        mark_rank()
        status = _run(birth, spec, entry)
    except BaseException as error:
        status = _status_of(error)
    finally:
        # Nothing may come in between here and the end: the frames below are the zygote's.
        for flush in (sys.stdout.flush, sys.stderr.flush, posix.flush_c_stdio):
            try:
                flush()
            except BaseException:
                pass
        os._exit(status)


def _run(birth: Birth, spec: RankSpec, entry: str) -> int:
    # torch may start threads as it is set up.
    posix.hold_parent_signal()
    _set_up(spec)
    function = find_entry(entry)
    if not posix.await_new_parent(birth.fork_helper, _RELEASE_TIMEOUT) or not os.read(birth.release, 1):
        # The agent does not know of this rank, so nobody would ever end it.
        return 1
    os.close(birth.release)
    posix.set_pdeathsig(signal.SIGKILL)
    # It counts from the call on, so an agent that was dead by then is looked for after it.
    if os.getppid() != birth.agent:
        print(f"the host agent ({birth.agent}) is not the parent of this rank; it ends", file=sys.stderr)
        return 1
    result = function(spec.config)
    return 0 if result is None else int(result) & 0xFF


def find_entry(entry: str) -> Callable[[bytes], int | None]:
    """The function that ``module:function`` names.

    Raises:
        ImportError: there is none; the text says which name was looked for.
    """
    module_name, colon, name = entry.partition(":")
    if not colon or not module_name or not name:
        raise ImportError(f"a rank's entry point is named as 'module:function', not {entry!r}")
    try:
        function: Any = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ImportError(f"no entry point {entry!r} for this rank: {error}") from error
    if not callable(function):
        raise ImportError(f"the entry point {entry!r} of this rank is no function but {function!r}")
    return cast(Callable[[bytes], "int | None"], function)


def _leave_zygote(stdout: int, stderr: int, keep: int, leads: bool) -> None:
    """Have nothing in common with the zygote but memory: group, signals, descriptors, streams."""
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
    sys.stdout = sys.__stdout__ = rank_text(1)
    sys.stderr = sys.__stderr__ = rank_text(2)
    posix.unbuffer_c_stdout()


def default_signals() -> None:
    """Have each signal do what it does in a fresh Python process."""
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
            # The zygote may have looked when there was nothing.
            sys.path_importer_cache.pop(new, None)
        sys.path[:] = spec.path
    try:
        os.chdir(spec.cwd)
    except OSError:
        pass
    _reseed()
    if spec.affinity:
        try:
            os.sched_setaffinity(0, spec.affinity)
        except OSError as error:
            # Cores come and go with the limits of a container: slower, and no reason not to run.
            print(f"this rank is not bound to cores {spec.affinity}: {error}", file=sys.stderr)
    _set_threads(spec.threads)
    posix.set_comm(spec.title)
    gc.enable()


def _reseed() -> None:
    """Give this rank random numbers of its own; torch's seed is a constant in any fresh process, and stays."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_threads(threads: int | None) -> None:
    wish = os.environ.get("OMP_NUM_THREADS")
    if wish is None and threads is not None:
        # For what is loaded later and for subprocesses.
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif wish is not None:
        # A list has one number for each level of nesting.
        first = wish.partition(",")[0].strip()
        threads = int(first) if first.isdecimal() and int(first) else threads
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _status_of(error: BaseException) -> int:
    """The exit status that Python would give; the error is shown on stderr as Python would show it."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        # It begins with the user's code, if it comes to that.
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        pass
    return 1
