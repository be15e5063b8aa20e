"""Answers, the errors in them, and what is given back with them: credit and memory."""

from __future__ import annotations

import msgspec

from monarch._wire.messages.base import Message, PackedBulk

RESULT = 0
"""Status of a Reply: its body is the pickled value."""
ERROR = 1
"""Status of a Reply: its body is a packed Failure."""
FAILED = 2
"""Status of a Reply: its body is the pickled value of a failed call, such as a cell with its error."""
STOPPED = 3
"""Status of a Reply: the same, of a call that was ended from outside, by an interrupt or because of other ranks."""
NOWHERE = -1
"""In place of a rank in a Reply: its sender is not in the addressed view, so ``src`` identifies it."""


class Failure(msgspec.Struct, array_like=True):
    """An exception on the wire: the body of a Reply or a Fault."""

    kind: str
    """Qualified name of its class."""
    text: str
    """Its message."""
    where: str
    """The line of user code that raised it, or an empty string."""
    trace: str
    """Its traceback: frames of user code, with ours folded."""
    pickled: bytes | None
    """The exception itself, if it can be pickled and unpickled."""
    own: bool
    """Whether it is an error of Monarch, to be raised unchanged, rather than of the endpoint."""
    freed: bool = False
    """Whether it only says that the call was freed from a collective because of an error elsewhere."""


class Reply(Message, tag=3):
    """A value, or an error, for a port."""

    src: str
    port: int
    rank: int
    """Position of the answering actor in the addressed view, or NOWHERE."""
    status: int
    done: int
    """Cost of messages from the receiver that the sender has finished: returns credit."""
    body: bytes
    bulk: PackedBulk | None = None
    frames: int = 0


class Credit(Message, tag=4):
    """Cost of messages from the receiver that have been finished, when no Reply reports it."""

    src: str
    done: int


class Release(Message, tag=5):
    """Shared memory that this proc no longer uses."""

    src: str
    segments: list[int]
