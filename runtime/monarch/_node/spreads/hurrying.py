"""Urgent messages to many hosts: they do not wait for a host on their way that hangs, but lives."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from monarch._node.spreads.gateway_like import GatewayLike
from monarch._node.spreads.spreads import Spreads
from monarch._wire import messages as m

PATIENCE = 0.4
"""Seconds for the word of a host that it has all messages; then it gets them, and answers, by a connection."""
_AGAIN = 0.1
"""Seconds that a process which was busy itself has for words that have come meanwhile."""


def hurry(spreads: Spreads, gateways: Sequence[GatewayLike]) -> None:
    """Let what was sent to these hosts arrive soon, and their answers; from any thread."""
    meant = [each for each in gateways if each.spreads is not None and not each.closed.is_set()]
    if not meant or not spreads.least:
        return
    # The host says at once what it has.
    nudge = m.encode(m.Signal(spreads.proc, [], 0))
    spreads.cast([(each, [f"{each.host}/agent"]) for each in meant], 0, [nudge])
    sent = spreads.newest(meant)
    begun = time.monotonic()
    spreads.later(PATIENCE, lambda: _look(spreads, sent, begun + PATIENCE))


def _look(spreads: Spreads, sent: Sequence[tuple[GatewayLike, int]], due: float) -> None:
    """Connect to the hosts that have not said that they have these messages; in the receiving thread."""
    now = time.monotonic()
    left: list[tuple[GatewayLike, int]] = []
    for gateway, number in sent:
        until = spreads.may_take(gateway, number)
        if until is not None and (now > due + _AGAIN or now < until + PATIENCE):
            left.append((gateway, number))
        elif until is not None:
            spreads.avoid_way(gateway)
    if left:
        spreads.later(_AGAIN, lambda: _look(spreads, left, math.inf))
