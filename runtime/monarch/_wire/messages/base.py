"""The base class of all messages."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PackedBulk: TypeAlias = tuple[str, int, int, int, list[tuple[int, int]]]
"""Shared memory that holds the large buffers of a message: owner, its pid, fd, segment, offset and length of each."""


class Message(msgspec.Struct, array_like=True, gc=False):
    """A message: one MessagePack array that begins with its tag."""
