"""Hosts that have lost each other while the program has both: then one of them counts as lost, for everybody."""

from __future__ import annotations

from functools import partial

from monarch._node.current import get_runtime
from monarch._node.service import service


@service("quick")
def parted(one: str, other: str) -> None:
    """Service: the agent of one host says that its connection to another one broke.

    What was on its way between their ranks may be gone, so their ranks are dead to each other, for good. If the one was
    lost as a whole, the program notices by itself within the time that a host may be silent.
    """
    runtime = get_runtime()
    if runtime.session is not None:
        runtime.pump.call_later(runtime.lease + 1.0, partial(_decide, one, other))


def _decide(one: str, other: str) -> None:
    runtime = get_runtime()
    if runtime.closed or any(host not in (runtime.host, *runtime.hosts) for host in (one, other)):
        return
    # The same one, whoever has said it first; and never the program's own.
    lost = max(host for host in (one, other) if host != runtime.host)
    kept = one if lost == other else other
    reason = f"was given up with its host {lost}: the connection between that and host {kept} broke"
    runtime.session.host_lost(lost, reason)
