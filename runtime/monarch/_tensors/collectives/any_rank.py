"""Receives from any rank, which end with the connections of their group.

gloo frees a thread from a collective or a message when connections close, but not from a receive from any rank, which
belongs to no connection (tried with torch 2.13). So a thread of this package waits in gloo, and the user's thread waits
for that one, in steps between which an interrupt or the end of the group reaches it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from monarch._python.threads import spawn_thread
from monarch._tensors.collectives.open_messages import GROUPS_TIMEOUT, waiting
from monarch._tensors.torch_compat import wrap_any_receive
from monarch.exceptions import GroupError

_STEP_S = 0.05


class _Wait:
    """A wait in gloo, in a thread of its own. If the user's thread leaves, it ends with the timeout that gloo has."""

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work = work
        self._patience = timeout
        self.reason = ""
        """Why to wait no longer. Written once, under ``_lock``."""
        self.ended = False
        """Whether gloo has returned. Written after the result, by the thread that waits in gloo."""
        self._result = False
        self._error: BaseException | None = None
        # Not a condition: a Stop wakes those of users, and takes this one for theirs.
        self._running = threading.Lock()
        """Held until gloo has returned."""
        self._running.acquire()
        spawn_thread("monarch-receive-any", self._run)

    def _run(self) -> None:
        try:
            self._result = bool(self._work.wait(self._patience))
        except BaseException as error:
            self._error = error
        self.ended = True
        self._running.release()

    def join(self) -> bool:
        """Return what gloo has returned.

        Raises:
            GroupError: the group has ended before.
            RuntimeError: gloo has raised it.
        """
        while not self.ended:
            if self.reason:
                raise GroupError(self.reason)
            if self._running.acquire(timeout=_STEP_S):
                self._running.release()
        if self._error is not None:
            raise self._error
        return self._result


on_left: list[Callable[[], object]] = []
"""Called when a thread of the user leaves a wait that continues in gloo. Set up before there is any."""
_lock = threading.Lock()
_open: list[_Wait] = []
"""Waits that a thread of the user is in. Under the lock; no other code runs under it."""


class AnyReceive(dist.Work):
    """A receive from any rank, as ``ProcessGroup.recv_anysource`` returns it."""

    def __init__(self, work: Any, group: Any) -> None:
        super().__init__()
        self._work = work
        self._group = group
        self._wait: _Wait | None = None
        """The first one; a second one in gloo would not end. Set by the user's thread."""

    def wait(self, timeout: timedelta = GROUPS_TIMEOUT) -> bool:
        """Wait until a message has come.

        Args:
            timeout: the timeout of the first wait; that of the group if it is zero.
        """
        try:
            # An interrupt may come at any step.
            with waiting(False, self._group, None, timeout) as longest:
                if self._wait is None:
                    self._wait = _Wait(self._work, longest)
                with _lock:
                    _open.append(self._wait)
                return self._wait.join()
        except BaseException:
            if self._wait is not None and not self._wait.ended and not self._wait.reason:
                for each in on_left:
                    each()
            raise
        finally:
            with _lock:
                if self._wait in _open:
                    _open.remove(self._wait)

    def synchronize(self) -> None:
        """Wait until a message has come."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether a wait for this work has ended."""
        return self._wait is not None and self._wait.ended

    def __getattribute__(self, name: str) -> Any:
        """Return what gloo's object has, but for the methods above."""
        if name in _OWN or name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(super().__getattribute__("_work"), name)


_OWN = {"_work", "_group", "_wait", "wait", "synchronize", "is_completed"}
WAITS = frozenset({AnyReceive.wait.__code__, AnyReceive.synchronize.__code__, _Wait.join.__code__})
"""Of the functions in which a thread of the user waits."""


def free_receives(reason: str) -> int:
    """End all receives from any rank of this process, since the connections of its groups are closed.

    Returns:
        Their number.
    """
    with _lock:
        for each in _open:
            each.reason = each.reason or reason
        return len(_open)


def observe_receives() -> bool:
    """Wait for receives from any rank in a thread from now on; return False if torch.distributed is not imported."""
    return wrap_any_receive(_observed)


def _observed(receive: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(receive)
    def recv_anysource(*args: Any, **kwargs: Any) -> Any:
        return AnyReceive(receive(*args, **kwargs), args[0])

    return recv_anysource
