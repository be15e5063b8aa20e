"""A distributed tensor in a message to its ranks."""

from __future__ import annotations

from typing import NamedTuple


class ShardRef(NamedTuple):
    """Stands for the shard of a tensor that the receiving rank has."""

    number: int
