"""Functions of Python's library that wait, and for what: what they are called with tells the rest."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from monarch._core.diagnosis.facts import Kind
from monarch._core.kinds import is_list, is_tuple
from monarch._debug.why.holders import line_of
from monarch._debug.why.pool_threads import of_future
from monarch._debug.why.workers_compat import THREADS, doing_of, of_executor, of_loader, of_pool, of_spawned
from monarch._python.frames import frame_of

_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_LONGEST = 80
"""Characters that are shown of a command."""
_NONE = ""
Values = Mapping[str, Any]


class KnownWait(NamedTuple):
    """A function that waits."""

    kind: Kind
    name: str
    describe: Callable[[Values], str] = lambda values: _NONE

    def look(self, values: Values) -> tuple[Kind, str]:
        """Return what code waits for that has called it, given its arguments."""
        what = self.describe(values)
        # A pool is of threads or processes.
        is_threads = self.kind is Kind.CHILD and what.endswith(THREADS)
        return Kind.THREAD if is_threads else self.kind, what


def _of_condition(values: Values) -> str:
    return type(values.get("self")).__name__


def _of_thread(values: Values) -> str:
    thread = values.get("self")
    name, ident = getattr(thread, "name", ""), getattr(thread, "ident", None)
    at = line_of(frame_of(ident)) if type(ident) is int else ""
    return f"thread {name!r}{f' at {at}' if at else ''}" if type(name) is str and name else ""


def of_child(values: Values) -> str:
    """Return the child process that ``subprocess`` waits for: its command, and the call that it is in."""
    child = values.get("self")
    args, pid = getattr(child, "args", None), getattr(child, "pid", None)
    return _command(args, pid) + doing_of(pid)


def _of_process(values: Values) -> str:
    process = values.get("self")
    name, pid = getattr(process, "name", ""), getattr(process, "pid", None)
    return f"process {name!r} (pid {pid}){doing_of(pid)}" if type(name) is str and type(pid) is int else ""


def _command(args: Any, pid: Any) -> str:
    words: Sequence[Any] = args if is_list(args) or is_tuple(args) else [args] if isinstance(args, str) else []
    # A command may be a whole script.
    text = " ".join(" ".join(word for word in words if isinstance(word, str)).split())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return f"{text} (pid {pid})" if text and type(pid) is int else text


def _known(kind: Kind, functions: str, describe: Callable[[Values], str] | None = None) -> dict[str, KnownWait]:
    return {
        name: KnownWait(kind, name.rpartition("/")[2]) if describe is None else KnownWait(kind, name, describe)
        for name in functions.split()
    }


_TABLE: dict[str, KnownWait] = {
    **_known(Kind.QUEUE, "queue.py:get queue.py:put queue.py:join"),
    **_known(Kind.EVENT, "threading.py:wait threading.py:wait_for", _of_condition),
    **_known(Kind.LOCK, "threading.py:acquire", _of_condition),
    **_known(Kind.LOCK, "threading.py:_acquire_restore multiprocessing/synchronize.py:__enter__"),
    **_known(Kind.THREAD, "threading.py:join threading.py:_wait_for_tstate_lock threading.py:_shutdown", _of_thread),
    **_known(Kind.CHILD, "subprocess.py:wait subprocess.py:_wait subprocess.py:communicate", of_child),
    **_known(Kind.CHILD, "multiprocessing/process.py:join", _of_process),
    **_known(Kind.CHILD, "torch/multiprocessing/spawn.py:join", of_spawned),
    **_known(Kind.QUEUE, "multiprocessing/queues.py:get multiprocessing/queues.py:put"),
    **_known(
        Kind.PIPE,
        "multiprocessing/connection.py:recv multiprocessing/connection.py:recv_bytes "
        "multiprocessing/connection.py:poll multiprocessing/connection.py:wait multiprocessing/connection.py:send",
    ),
    **_known(Kind.EVENT, "multiprocessing/synchronize.py:wait"),
    **_known(
        Kind.CHILD,
        "multiprocessing/pool.py:get multiprocessing/pool.py:wait multiprocessing/pool.py:join "
        "multiprocessing/pool.py:next",
        of_pool,
    ),
    **_known(Kind.CHILD, "concurrent/futures/thread.py:shutdown concurrent/futures/process.py:shutdown", of_executor),
    **_known(Kind.CHILD, "torch/utils/data/dataloader.py:_try_get_data", of_loader),
    **_known(
        Kind.THREAD,
        "concurrent/futures/_base.py:result concurrent/futures/_base.py:wait concurrent/futures/_base.py:exception "
        "concurrent/futures/_base.py:as_completed",
        of_future,
    ),
    **_known(
        Kind.SOCKET,
        "socket.py:accept socket.py:readinto socket.py:create_connection socket.py:recv ssl.py:read ssl.py:recv "
        "http/client.py:getresponse urllib/request.py:urlopen socketserver.py:serve_forever",
    ),
    **_known(Kind.GPU, "torch/cuda/__init__.py:synchronize torch/cuda/streams.py:synchronize"),
    **_known(Kind.LOCK, "importlib/_bootstrap.py:acquire"),
    **_known(Kind.SLEEP, "sched.py:run"),
}  # fmt: skip
"""By file below the folder of Python's library, or of packages, and function."""


def known_wait(frame: FrameType | None, ends: Callable[[FrameType], bool]) -> tuple[KnownWait, FrameType] | None:
    """Return the outermost known wait that the user's code has called, and its frame; None if there is none.

    Args:
        frame: the innermost one.
        ends: whether a frame is of the user's code, where the search ends.
    """
    found: tuple[KnownWait, FrameType] | None = None
    while frame is not None and not ends(frame):
        known = _TABLE.get(_name_of(frame))
        if known is not None:
            found = known, frame
        frame = frame.f_back
    return found


def _name_of(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    short = "importlib/_bootstrap.py" if file == "<frozen importlib._bootstrap>" else file.removeprefix(_LIBRARY)
    _, installed, below = short.partition("site-packages/")
    short = below if installed else short
    return f"{short}:{frame.f_code.co_name}"
