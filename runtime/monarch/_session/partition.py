"""Hosts that have lost each other while the program has both: then one of them counts as lost, for everybody."""

from __future__ import annotations

from functools import partial

from monarch._core.causes import HostsParted
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._session.session import need_session, session_of


@service("quick")
def parted(one: str, other: str) -> None:
    """Service: the agent of one host says that its connection to another one broke.

    What was on its way between their ranks may be gone, so their ranks are dead to each other, for good. If the one was
    lost as a whole, the program notices by itself within the time that a host may be silent.
    """
    node = current_node()
    if session_of(node) is not None:
        node.pump.call_later(node.hosts.lease + 1.0, partial(_decide, one, other))


def _decide(one: str, other: str) -> None:
    node = current_node()
    if node.closed or any(host not in (node.host, *node.hosts.known) for host in (one, other)):
        return
    # The same one, whoever has said it first; and never the program's own.
    lost = max(host for host in (one, other) if host != node.host)
    kept = one if lost == other else other
    need_session(node).host_lost(lost, HostsParted(lost, kept))
