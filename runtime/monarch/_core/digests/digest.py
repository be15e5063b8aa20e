"""The digest of a value, and how two arrays differ by their digests."""

from __future__ import annotations

from typing import NamedTuple

DIGEST = "digest"
"""Key of a MIME bundle that is no MIME type and is not shown: the Digest of the value, or None if its contents cannot
be compared. Without it, all of the value is in the bundle."""
RAW_BYTES = 16 << 10
"""Maximum size in bytes of an array whose digest holds its contents, so that differing elements can be counted."""


class Digest(NamedTuple):
    """A digest: two values are equal exactly if their ``whole`` is equal."""

    whole: str
    """Hash of type and contents, in hexadecimal."""
    form: str = ""
    """Type, dtype, shape and device type of an array; empty for other values."""
    width: int = 0
    """Bytes of an element of an array."""
    blocks: tuple[tuple[int, bytes], ...] = ()
    """Number of elements and hash of each consecutive part of an array."""
    raw: bytes = b""
    """Contents of a small array."""


def describe_difference(one: Digest, other: Digest) -> str:
    """Return where two arrays differ, such as ``at 99 of 100 elements``; empty if their digests do not tell."""
    if not one.form or one.form != other.form or len(one.blocks) != len(other.blocks):
        return ""
    count = sum(size for size, _ in one.blocks)
    if one.raw and other.raw and one.width:
        starts = range(0, len(one.raw), one.width)
        if count == 1:
            return ""
        differing = sum(one.raw[at : at + one.width] != other.raw[at : at + one.width] for at in starts)
        return f"at {differing:,} of {count:,} elements"
    return _describe_blocks(one, other, count)


def _describe_blocks(one: Digest, other: Digest, count: int) -> str:
    start = 0
    differing: list[tuple[int, int]] = []
    for (size, mine), (_, theirs) in zip(one.blocks, other.blocks, strict=True):
        if mine != theirs:
            differing.append((start, size))
        start += size
    if not differing:
        return ""
    first, size = differing[0]
    among = sum(each for _, each in differing)
    return (
        f"in {len(differing):,} of {len(one.blocks):,} blocks, which hold {among:,} of {count:,} elements "
        f"(first block: elements {first:,}-{first + size - 1:,} in row-major order)"
    )
