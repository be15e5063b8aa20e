"""Large frames over tcp go in pieces, so that a listener can refuse large frames of strangers.

ZeroMQ's frame size limit applies to a whole listener, before and after a connection is authenticated. With a small
limit a stranger can make a host hold one small piece and no more; processes with the key split larger frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._wire.messages import Split, encode
from monarch.exceptions import ProtocolError

PIECE = 256 << 10
"""Bytes of the largest frame over tcp."""
LARGEST = PIECE + 1024
"""Largest message that a tcp listener accepts; CURVE adds far less than the difference to a piece."""


def split(frames: Sequence[Any]) -> list[Any] | None:
    """Return the frames in pieces, with a Split in front; None if all are small enough."""
    if all(len(frame) <= PIECE for frame in frames):
        return None
    parts: list[int] = []
    pieces: list[Any] = []
    for frame in frames:
        view = memoryview(frame).cast("B") if len(frame) else frame
        some = [view[at : at + PIECE] for at in range(0, len(view), PIECE)] or [view]
        parts.append(len(some))
        pieces += some
    return [encode(Split(parts, len(pieces))), *pieces]


def join(message: Split, pieces: Sequence[Any]) -> list[Any]:
    """Return the original frames; those of several pieces are writable.

    Raises:
        ProtocolError: the number of pieces differs from what the message says.
    """
    if not message.parts or min(message.parts) < 1 or sum(message.parts) != len(pieces):
        raise ProtocolError(f"split message: expected {sum(message.parts)} pieces, got {len(pieces)}")
    frames: list[Any] = []
    at = 0
    for count in message.parts:
        some = pieces[at : at + count]
        frames.append(some[0] if count == 1 else bytearray().join(some))
        at += count
    return frames
