"""Errors of calls whose futures are dropped before anybody has read them: they are told, so that none is silent."""

from __future__ import annotations

import sys
from collections.abc import Callable

from monarch._wire.messages import Failure
from monarch._wire.receiving.aside import tell

_LONGEST = 500
"""Characters shown of an error."""
_STOPPED = ("KeyboardInterrupt", "asyncio.exceptions.CancelledError", "concurrent.futures._base.CancelledError")
"""Errors of calls that somebody has stopped."""


class UnreadError:
    """The first error that arrived for a future; told when the future is dropped, unless it was read.

    Args:
        label: the call.
        rank: whose endpoint raised.
        failure: the error.
    """

    __slots__ = ("_text", "is_read")

    def __init__(self, label: str, rank: int, failure: Failure) -> None:
        first = f"{failure.kind}: {failure.text}".partition("\n")[0][:_LONGEST]
        where = f" at {failure.where}" if failure.where else ""
        self._text = (
            f"monarch: {label} failed on rank {rank}{where}: {first}\n"
            f"  its future was dropped without get(), which raises the error with its traceback"
        )
        self.is_read = failure.freed or failure.kind in _STOPPED
        """Whether there is nothing to tell. Set by any thread."""

    def __del__(
        self, tell: Callable[[str], None] = tell, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if not self.is_read and not is_finalizing():
            tell(self._text)
