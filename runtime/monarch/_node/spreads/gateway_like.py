"""The members of a connection that messages from host to host use."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from threading import Event
from typing import Any, Protocol


class GatewayLike(Protocol):
    """A connection to another host; see ``monarch._node.peers.gateway``."""

    host: str
    settled: float
    last: int
    arrived: int
    due: int
    heard: list[int]
    relay: str
    group: int
    spreads: Any
    """The Spreads that numbers its messages, or None."""
    closed: Event
    keeps: bool
    kept: deque[Any]
    spare: Any

    link: Any

    @property
    def parent(self) -> GatewayLike | None: ...
    def cast(self, src: str, procs: list[str], port: int, frames: Sequence[Any]) -> None: ...


Far = Sequence[tuple[GatewayLike, list[str]]]
"""The receivers of a message on other hosts."""


def is_settled(gateway: GatewayLike) -> bool:
    """Return whether a host may get messages through others, and forward them."""
    if not gateway.arrived or gateway.arrived < gateway.due:
        return False
    return gateway.settled < time.monotonic() and not gateway.closed.is_set()
