"""Which host relays a message to which others: groups of hosts, and the first host of each."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from monarch._node.spreads.gateway_like import Far, GatewayLike, is_settled
from monarch._wire import messages as m


def group_of(receiver: tuple[GatewayLike, list[str]]) -> int:
    return receiver[0].group


def led(ordered: list[tuple[GatewayLike, list[str]]]) -> list[tuple[GatewayLike, list[str]]]:
    """Return the receivers of a message by their groups, each of which begins with a host that has a connection.

    That may be one that only passes it on.
    """
    leaders: dict[int, GatewayLike] = {}
    for gateway, _ in ordered:
        parent = gateway.parent
        if parent is not None and is_settled(parent):
            leaders[gateway.group] = parent
    if not leaders:
        return ordered
    groups: dict[int, list[tuple[GatewayLike, list[str]]]] = {}
    for each in ordered:
        groups.setdefault(each[0].group, []).append(each)
    for group, members in groups.items():
        leader = leaders.get(group)
        if leader is None or leader.group != group:
            continue
        at = next((place for place, (gateway, _) in enumerate(members) if gateway is leader), -1)
        nobody: list[str] = []
        members.insert(0, members.pop(at) if at >= 0 else (leader, nobody))
    return [each for members in groups.values() for each in members]


class RelayPlan:
    """The receivers of a message, in parts of which each is sent to its first host."""

    __slots__ = ("ends", "fan", "far", "fit", "gateways", "packed")

    def __init__(self, far: Far, ends: list[int], fan: int) -> None:
        self.far = far
        self.gateways = [gateway for gateway, _ in far]
        self.ends = ends
        """Where the parts begin and end."""
        self.fan = fan
        """As in Spread."""
        self.fit = len(far)
        """The number of receivers, without hosts that only pass it on."""
        hosts = [(gateway.host, procs) for gateway, procs in far]
        self.packed = [m.pack(hosts[begin:end]) for begin, end in pairwise(ends)]
        """The hosts of each part, as in Spread."""

    def relay(self, place: int) -> str:
        """Return the host that forwards the message to a host."""
        return self.gateways[self.ends[bisect_right(self.ends, place) - 1]].host
