"""The sentences about ranks of a process group whose calls are not parts of one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch._core.collective_calls import CollectiveCall
from monarch._core.shapes.ranks import describe_ranks

_SHOWN = 6
"""Most different calls shown."""


def describe_calls(calls: Mapping[int, CollectiveCall], members: Sequence[int], group: str) -> str:
    """Return an error: what each rank has called and where, and what to do.

    Args:
        calls: by rank in the group.
        members: the ranks of the group, as the program numbers them.
        group: as in ``the default group``.
    """
    ranks_of: dict[str, list[int]] = {}
    for place, call in sorted(calls.items()):
        text = call.text(members[call.root] if 0 <= call.root < len(members) else -1)
        ranks_of.setdefault(f"{text} at {call.place}" if call.place else text, []).append(members[place])
    texts = [f"{describe_ranks(ranks)} called {text}" for text, ranks in list(ranks_of.items())[:_SHOWN]]
    more = sum(map(len, list(ranks_of.values())[_SHOWN:]))
    several = ", ".join([*texts, *([f"{more} more ranks called other collectives"] if more else [])])
    return f"ranks of {group} called mismatching collectives: {several}; {_advice(calls)}"


def _advice(calls: Mapping[int, CollectiveCall]) -> str:
    several = list(calls.values())
    ended = "no collective has started, and the group still works"
    if len({each.kind for each in several}) > 1:
        return f"call the same collective on all ranks; {ended}"
    if len({each.root for each in several}) > 1 or len({each.reduction for each in several}) > 1:
        return f"call it with the same op, src and dst on all ranks; {ended}"
    return f"pass tensors of matching shape and dtype on all ranks; {ended}"


def describe_timeout(operation: str, group: str, seconds: float) -> str:
    """Return an error about a collective that has not ended in time."""
    return (
        f"timed out after {seconds:g} s: other ranks have not joined {operation} of {group}; call it on all of its "
        f"ranks, or use a longer timeout"
    )


def describe_late_message(sends: bool, peer: int | None, group: str, seconds: float) -> str:
    """Return an error about a message that has not been received, or has not come, in time.

    Args:
        sends: whether this rank sends it.
        peer: the rank at the other end; None for any.
        group: what to call its group.
        seconds: the timeout.
    """
    if sends:
        what, do = f"{describe_ranks([peer or 0])} has not received a message in {group}", "receive it there"
    elif peer is None:
        what, do = f"no rank has sent a message in {group}", "send it on one of its ranks"
    else:
        what, do = f"{describe_ranks([peer])} has not sent a message in {group}", "send it there"
    return f"timed out after {seconds:g} s: {what}; {do}, or use a longer timeout"


def describe_missing(call: CollectiveCall, ranks: Sequence[int], group: str, seconds: float) -> str:
    """Return an error about ranks that have not come to a collective in time."""
    at = f" at {call.place}" if call.place else ""
    have = "has" if len(ranks) == 1 else "have"
    return (
        f"timed out after {seconds:g} s: {describe_ranks(ranks)} {have} called no collective of {group}, which waits "
        f"in {call.text(-1)}{at}; call it on all of its ranks, or use a longer timeout"
    )
