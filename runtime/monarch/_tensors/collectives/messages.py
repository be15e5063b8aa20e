"""The messages between two ranks that wait for their end: a ``Work`` of torch does not tell its peer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from monarch._tensors.torch_compat import wrap_messages


class Message(NamedTuple):
    """One end of a message.

    Attributes:
        operation: "isend" or "irecv".
        group: of torch.
        peer: the rank at the other end, in the mesh.
        tag: of the message.
        tensor: that is sent or received, while it is there.
    """

    operation: str
    group: Any
    peer: int
    tag: int
    tensor: weakref.ref[torch.Tensor]


_known: weakref.WeakKeyDictionary[Any, tuple[str, Any, int, int, weakref.ref[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""By ``Work``: operation, group, peer in the group, tag and tensor. Any thread, in single operations."""


def observe_messages() -> None:
    """Note the peer of each message that begins from now on, in a process that has imported torch.distributed."""
    wrap_messages(functools.partial(_noting, "isend"), functools.partial(_noting, "irecv"))


def message_of(work: Any) -> Message | None:
    """Return the message for whose end a ``Work`` stands; None if it stands for a collective, or is not known."""
    found = _known.get(work) if isinstance(work, dist.Work) else None
    if found is None:
        return None
    operation, group, peer, tag, tensor = found
    try:
        return Message(operation, group, dist.get_global_rank(group, peer), tag, tensor)
    except (KeyError, ValueError):
        # The group has been destroyed.
        return None


def _noting(operation: str, begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begin_noted(self: Any, tensors: Any, peer: int, tag: int = 0, *args: Any, **kwargs: Any) -> Any:
        work = begin(self, tensors, peer, tag, *args, **kwargs)
        if work is not None:
            _known[work] = operation, self, peer, tag, weakref.ref(tensors[0])
        return work

    return begin_noted
