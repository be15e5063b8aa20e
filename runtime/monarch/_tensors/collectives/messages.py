"""The messages between two ranks that wait for their end: a ``Work`` of torch does not tell its peer.

Those of gloo get a ``Work`` of this package, whose timeout does not count while a rank of the mesh is paused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from monarch._tensors.collectives.any_rank import WAITS as _ANY
from monarch._tensors.collectives.open_messages import GROUPS_TIMEOUT, waiting
from monarch._tensors.torch_compat import wrap_messages


class MessageEnd(NamedTuple):
    """One end of a message.

    Attributes:
        operation: "isend" or "irecv".
        group: a torch process group.
        peer: the rank at the other end, in the mesh.
        tag: the tag of the message.
        tensor: that is sent or received, while it is there.
    """

    operation: str
    group: Any
    peer: int
    tag: int
    tensor: weakref.ref[torch.Tensor]


class HeldMessage(dist.Work):
    """One end of a message of gloo, as ``ProcessGroup.send`` and ``ProcessGroup.recv`` return it."""

    def __init__(self, work: Any, sends: bool, group: Any, peer: int) -> None:
        super().__init__()
        self._work = work
        self._end = sends, group, peer

    def wait(self, timeout: timedelta = GROUPS_TIMEOUT) -> bool:
        """Wait until the message is sent or received.

        Args:
            timeout: that of the group if it is zero; then it does not count while a rank of the mesh is paused.
        """
        with waiting(*self._end, timeout) as longest:
            return bool(self._work.wait(longest))

    def synchronize(self) -> None:
        """Wait until the message is sent or received."""
        self.wait()

    def __getattribute__(self, name: str) -> Any:
        """Return what gloo's object has, but for the methods above."""
        if name in _OWN or name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(super().__getattribute__("_work"), name)


_OWN = {"_work", "_end", "wait", "synchronize"}
_HELD = frozenset({HeldMessage.wait.__code__, HeldMessage.synchronize.__code__})
WAITS = _ANY | _HELD
"""Of the functions of this package in which a thread of the user waits for a message."""
_known: weakref.WeakKeyDictionary[Any, tuple[str, Any, int, int, weakref.ref[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""By ``Work``: operation, group, peer in the group, tag and tensor. Any thread, in single operations."""


def observe_messages() -> None:
    """Note the peer of each message that begins from now on, in a process that has imported torch.distributed."""
    wrap_messages(functools.partial(_noting, "isend"), functools.partial(_noting, "irecv"))


def message_in(frame: FrameType) -> MessageEnd | None:
    """Return the message for whose end a thread waits in this package.

    Args:
        frame: the innermost frame of the thread.
    """
    return message_of(frame.f_locals.get("self")) if frame.f_code in _HELD else None


def message_of(work: Any) -> MessageEnd | None:
    """Return the message for whose end a ``Work`` stands; None if it stands for a collective, or is not known."""
    found = _known.get(work) if isinstance(work, dist.Work) else None
    if found is None:
        return None
    operation, group, peer, tag, tensor = found
    try:
        return MessageEnd(operation, group, dist.get_global_rank(group, peer), tag, tensor)
    except (KeyError, ValueError):
        # The group has been destroyed.
        return None


def _noting(operation: str, begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begin_noted(self: Any, tensors: Any, peer: int, tag: int = 0, *args: Any, **kwargs: Any) -> Any:
        work = begin(self, tensors, peer, tag, *args, **kwargs)
        if work is None:
            return work
        # Those of a GPU have ended before their tensors are read: to wait for them takes no time.
        if tensors[0].device.type == "cpu":
            work = HeldMessage(work, operation == "isend", self, peer)
        _known[work] = operation, self, peer, tag, weakref.ref(tensors[0])
        return work

    return begin_noted
