"""Errors of calls whose futures are dropped before anybody has read them: they are told, so that none is silent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from weakref import WeakValueDictionary

from monarch._core.text.advice import advice
from monarch._wire.messages import Dead, Failure
from monarch._wire.receiving.aside import tell
from monarch.exceptions import StoppedError

_LONGEST = 500
"""Characters shown of an error."""
_STOPPED = ("KeyboardInterrupt", "asyncio.exceptions.CancelledError", "concurrent.futures._base.CancelledError")
"""Errors of calls that somebody has stopped."""


class UnreadError:
    """The first error that arrived for a future; told when the future is dropped, unless it was read.

    The futures that one death ends share theirs, so that it is told once, and not at all if one of them was read.

    Args:
        text: what has failed.
        is_read: whether there is nothing to tell.
    """

    __slots__ = ("__weakref__", "_text", "is_read")

    def __init__(self, text: str, is_read: bool = False) -> None:
        self._text = f"monarch: {text}\n  its future was dropped without get(); call get() to see the traceback"
        self.is_read = is_read
        """Whether there is nothing to tell. Set by any thread."""

    def __del__(
        self, tell: Callable[[str], None] = tell, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if not self.is_read and not is_finalizing():
            tell(self._text)


_of_deaths: WeakValueDictionary[str, UnreadError] = WeakValueDictionary()
"""By the dead process, or by the reason why all calls to its mesh fail."""


def of_endpoint(label: str, rank: int, failure: Failure) -> UnreadError:
    """Return the error of a call whose endpoint raised on a rank."""
    first = f"{failure.kind}: {failure.text}".partition("\n")[0][:_LONGEST]
    where = f" at {advice().placed(failure.where)}" if failure.where else ""
    text = f"{label} failed on rank {rank}{where}: {first}"
    # An actor that ends because its mesh was stopped says so in an error of ours.
    is_stopped = failure.kind in _STOPPED or (failure.own and failure.kind == StoppedError.__name__)
    return UnreadError(text, failure.freed or is_stopped)


def of_death(label: str, rank: int, dead: Dead) -> UnreadError:
    """Return the error of the calls that a death ends; any thread may call it."""
    return _shared(dead.proc, f"{label} failed: the process of rank {rank} {dead.reason}")


def of_mesh(label: str, why: str) -> UnreadError:
    """Return the error of the calls to a mesh that fail after a death; any thread may call it."""
    return _shared(why, f"{label} failed: {why}")


def _shared(key: str, text: str) -> UnreadError:
    # Two threads may each make one; then both are told.
    known = _of_deaths.get(key)
    if known is None:
        known = _of_deaths[key] = UnreadError(text)
    return known
