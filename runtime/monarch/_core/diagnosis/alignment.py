"""Waits for asynchronous collectives, compared by their order in the group.

Ranks may wait for the same operation and have begun others before it in different order. The first collective that
differs is what keeps them waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from monarch._core.diagnosis.facts import Doing, Entered, RankFacts, Unended

_Group = tuple[str, str, tuple[int, ...]]
"""Uid of a process mesh, torch's name of a group, and its members."""


def aligned(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the activity of ranks, with the first collective that differs in place of the one that they wait for."""
    waits: dict[_Group, list[tuple[Unended, ...]]] = {}
    for each in facts:
        for entered in _with_unended(each):
            waits.setdefault(_group(each.uid, entered), []).append(entered.unended)
    differing = {group: order for group, unended in waits.items() if (order := _first_different(unended))}
    return [
        each._replace(doings=tuple(_moved(doing, each.uid, differing) for doing in each.doings)) if differing else each
        for each in facts
    ]


def _with_unended(facts: RankFacts) -> Iterator[Entered]:
    yield from (each.entered for each in facts.doings if each.entered is not None and each.entered.unended)


def _group(uid: str, entered: Entered) -> _Group:
    return uid, entered.group, entered.members


def _first_different(waits: Sequence[tuple[Unended, ...]]) -> int:
    """Return the order of the first collective that is another one on some rank; 0 if none is."""
    by_order: dict[int, set[tuple[str, str]]] = {}
    for unended in waits:
        for each in unended:
            by_order.setdefault(each.order, set()).add((each.operation, each.tensors if each.is_alike else ""))
    return min((order for order, kinds in by_order.items() if len(kinds) > 1), default=0)


def _moved(doing: Doing, uid: str, differing: dict[_Group, int]) -> Doing:
    entered = doing.entered
    order = differing.get(_group(uid, entered), 0) if entered is not None and entered.unended else 0
    one = next((each for each in entered.unended if each.order == order), None) if entered is not None else None
    if entered is None or one is None:
        return doing
    same = one.operation == entered.operation
    moved = entered._replace(
        operation=one.operation, number=one.number, tensors=one.tensors, is_alike=one.is_alike,
        reduction=entered.reduction if same else "", root=entered.root if same else -1,
    )  # fmt: skip
    return doing._replace(entered=moved)
