"""The messages between ranks that threads of this process wait for, and since when.

gloo fixes the timeout of messages when their group is made. So it is given another one with each wait, which never
ends, and the rank watches the real one (decision 0073).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from monarch._tensors.torch_compat import HELD, backend_timeout

GROUPS_TIMEOUT = timedelta()
"""Torch's value for the timeout of the group."""
_PAUSED = timedelta(days=1)
"""The longest pause for a receive from any rank, whose wait in gloo lasts if the user's thread leaves it."""


class OpenMessage:
    """A wait for the end of a message.

    Args:
        sends: whether this process sends it.
        group: a torch process group.
        peer: the rank at the other end, in the group; None for any.
        seconds: the timeout of the group.
    """

    def __init__(self, sends: bool, group: Any, peer: int | None, seconds: float) -> None:
        self.sends, self.group, self.seconds = sends, group, seconds
        self.since = time.monotonic()
        """When the timeout began. After that of the thread that watches timeouts."""
        self._peer = peer

    @property
    def peer(self) -> int | None:
        """The rank at the other end, in the mesh; None for any.

        Raises:
            KeyError, ValueError: the group has been destroyed.
        """
        return None if self._peer is None else dist.get_global_rank(self.group, self._peer)


_open: dict[int, OpenMessage] = {}
"""By their ids. Any thread, in single operations."""


@contextmanager
def waiting(sends: bool, group: Any, peer: int | None, timeout: timedelta) -> Generator[timedelta]:
    """Note that this thread waits for a message meanwhile.

    Args:
        sends: whether this process sends it.
        group: a torch process group.
        peer: the rank at the other end, in the group; None for any.
        timeout: the timeout of the caller.

    Yields:
        The timeout for gloo.
    """
    groups = backend_timeout(group, "cpu") if timeout == GROUPS_TIMEOUT else None
    if groups is None or groups < HELD:
        # That of the caller, which has chosen it for this wait, or gloo's, which nobody else watches.
        yield timeout
        return
    one = OpenMessage(sends, group, peer, (groups - HELD).total_seconds())
    try:
        _open[id(one)] = one
        yield HELD if peer is not None else groups - HELD + _PAUSED
    finally:
        _open.pop(id(one), None)


def open_messages() -> list[OpenMessage]:
    """Return the messages that threads are waiting for, and whose timeout gloo does not see."""
    return list(_open.values())


def is_open(message: OpenMessage) -> bool:
    """Return whether a thread still waits for it."""
    return id(message) in _open
