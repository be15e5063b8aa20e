"""The parties of a diagnosis, each of which waits as one, and for whom each one waits.

Ranks in the same collective are one party, so the work grows with the number of different waits, not with the square of
the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from monarch._core.diagnosis.alignment import aligned
from monarch._core.diagnosis.facts import ANSWERLESS, FORMING, Doing, Entered, Kind, RankFacts, Target
from monarch._core.unjoined import SYMMETRIC

Place = tuple[str, int]
"""Uid of a process mesh, and a rank of it."""
_MAKING = ("new_group", "init_device_mesh", "split_group")


@dataclass(eq=False)
class Party:
    """Ranks that do the same, and so wait for the same."""

    uid: str
    members: list[tuple[int, Doing]] = field(default_factory=list[tuple[int, Doing]])
    """By rank, ascending."""
    waits_for: list[Party] = field(default_factory=list["Party"])
    outside: list[Target] = field(default_factory=list[Target])
    """Actors that it waits for on ranks that were not asked."""
    has_begun: bool = False
    """Whether it is idle, after as many operations of the group as ranks that wait for it."""
    has_missed: bool = False
    """Whether it has not joined a collective that ranks wait in for it."""

    @property
    def doing(self) -> Doing:
        """The activity of its first rank."""
        return self.members[0][1]

    @property
    def entered(self) -> Entered | None:
        """The collective that it is in."""
        return self.doing.entered

    @property
    def ranks(self) -> list[int]:
        """Its ranks."""
        return [rank for rank, _ in self.members]

    @property
    def seconds(self) -> float:
        """How long all of its ranks have certainly waited."""
        return min(doing.seconds for _, doing in self.members)

    @property
    def cores(self) -> float:
        """CPU cores that the busiest of its ranks uses."""
        return max(doing.cores for _, doing in self.members)


def parties_of(facts: Sequence[RankFacts]) -> list[Party]:
    """Return the parties among ranks, each with those that it waits for."""
    by_wait: dict[object, Party] = {}
    of_rank: dict[Place, list[Party]] = {}
    counts = {(each.uid, each.rank): dict(each.counts) for each in facts}
    facts = aligned(facts)
    for each in sorted(facts, key=lambda facts: (facts.uid, facts.rank)):
        for doing in [_on_gpu(one, each.uid, counts) for one in each.doings] or [Doing(Kind.IDLE)]:
            key = (each.uid, *_signature(doing.entered)) if doing.entered is not None else object()
            party = by_wait.setdefault(key, Party(each.uid))
            # Several calls of a rank may be in one collective, by mistake.
            if each.rank not in party.ranks[-1:]:
                party.members.append((each.rank, doing))
            of_rank.setdefault((each.uid, each.rank), []).append(party)
    parties = list(by_wait.values())
    for party in parties:
        found = list(_waits_for(party, of_rank, counts))
        party.waits_for = [each for each in dict.fromkeys(found) if each is not party]
        party.outside = [each for each in party.doing.targets if (each.uid, each.rank) not in of_rank]
    return parties


def _on_gpu(doing: Doing, uid: str, counts: dict[Place, dict[str, int]]) -> Doing:
    """Return the activity of a rank, as a wait in a collective if its GPU waits for others that have not begun it."""
    for each in doing.issued:
        others = [counts.get((uid, rank), {}).get(each.group) for rank in each.members]
        if any(count is not None and count < each.number for count in others):
            return doing._replace(kind=Kind.GPU, entered=each)
    return doing


def _signature(entered: Entered) -> tuple[object, ...]:
    """Return what is the same for all ranks whose collectives belong together."""
    if entered.is_message:
        return entered.group, entered.operation, entered.peers, entered.tag, entered.number
    tensors = entered.tensors if entered.is_alike else ""
    # Composed operations, such as all_gather_object, begin several; so the name decides where it is known.
    number = 0 if entered.operation else entered.number
    return entered.group, entered.operation, number, tensors, entered.reduction, entered.root, entered.members


def _waits_for(party: Party, of_rank: dict[Place, list[Party]], counts: dict[Place, dict[str, int]]) -> Iterator[Party]:
    entered = party.entered
    if entered is None:
        for target in party.doing.targets:
            parties = of_rank.get((target.uid, target.rank), [])
            theirs = [each for each in parties if each.doing.actor == target.actor]
            yield from theirs or parties
        return
    ranks = set(party.ranks)
    others = {rank: _of_actor(party.doing.actor, of_rank[party.uid, rank]) for rank in entered.peers or entered.members
              if rank not in ranks and (party.uid, rank) in of_rank}  # fmt: skip
    if entered.operation == FORMING:
        yield from (each for theirs in others.values() for each in theirs if each.doing.kind in ANSWERLESS)
        return
    if entered.is_message:
        partners = [each for theirs in others.values() for each in _partners(party, theirs)]
        active = [each for each in partners if each.doing.kind is not Kind.IDLE]
        # Of a message from an unknown rank, any that still runs may be the other end.
        yield from partners if entered.peers else active or partners
        return
    begun = {rank: counts.get((party.uid, rank), {}).get(entered.group) for rank in others}
    found = [each for rank, theirs in others.items() for each in _missing(party, theirs, begun[rank])]
    # Messages count as well, so a rank may have begun enough operations without this one.
    elsewhere = [each for theirs in others.values() for each in theirs if each.entered is None]
    if found or entered.operation not in SYMMETRIC:
        for each in found:
            each.has_missed = True
        yield from found
        return
    for rank, theirs in others.items():
        for each in theirs:
            each.has_begun = each.doing.kind is Kind.IDLE and begun[rank] is not None
    yield from elsewhere


def _of_actor(actor: str, parties: list[Party]) -> list[Party]:
    """Return those of a rank's parties that run the same actor, or are in a collective; without any, all of them."""
    return [each for each in parties if each.doing.actor == actor or each.entered is not None] or parties


def _partners(party: Party, theirs: Sequence[Party]) -> Iterable[Party]:
    """Return the parties of a peer, unless it is at the other end of the message."""
    entered = party.entered
    assert entered is not None
    for each in theirs:
        other = each.entered
        if other is None or not other.is_message or other.group != entered.group:
            continue
        sends = [one.operation.startswith(("send", "isend")) for one in (entered, other)]
        meets = not other.peers or bool(set(other.peers) & set(party.ranks))
        if sends[0] != sends[1] and meets and other.tag == entered.tag:
            return ()
    return theirs


def _is_rooted(entered: Entered) -> bool:
    """Return whether a collective has a root, which the wait for one that was begun before does not name."""
    return entered.root >= 0 or entered.operation not in (*SYMMETRIC, *_MAKING)


def _missing(party: Party, theirs: Sequence[Party], begun: int | None) -> Iterable[Party]:
    """Return the parties of a rank that has not joined a collective; none if it has."""
    entered = party.entered
    assert entered is not None
    numbers = [doing.entered.number for _, doing in party.members if doing.entered is not None]
    number = min(numbers)
    inside = [each for each in theirs if each.entered is not None and each.entered.group == entered.group]
    inside = [each for each in inside if each.entered is not None and not each.entered.is_message] or inside
    for each in inside:
        other = each.entered
        assert other is not None
        if not entered.operation or not other.operation:
            # A wait for a Work does not name its operation; the numbers tell who is behind.
            return () if other.number >= number else inside
        if other.number > number and _is_rooted(entered):
            # Ranks may leave this kind of collective before all have joined.
            return ()
    if inside:
        return inside
    if entered.operation in _MAKING or not number:
        return theirs
    return () if begun is not None and begun >= number else theirs
