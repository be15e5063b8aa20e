"""The meaning of the waits of ranks: those that cannot end, and the ranks that the others wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from monarch._core.diagnosis.facts import COMPUTES, Doing, Entered, Kind, RankFacts, Target
from monarch._core.diagnosis.parties import Party, parties_of
from monarch._core.position import Frame

BUSY = 0.2
"""CPU cores from which on a rank makes progress, with its child processes."""


class Level(str, Enum):
    """How sure it is that a wait does not end."""

    STUCK = "stuck"
    """It cannot end by itself."""
    WAITING = "waiting"
    """It may end, but nothing is computed there."""
    SLOW = "slow"
    """Ranks wait for one that computes."""


class Cause(str, Enum):
    """Likely causes."""

    DIFFERENT = "different collectives"
    TENSORS = "different tensors"
    ROOT = "different source or destination"
    REDUCTION = "different reduction"
    GROUPS = "different groups"
    MESSAGES = "unmatched messages"
    CYCLE = "a cycle of waits"
    IDLE = "ended without it"
    UNLIKE = "ended after as many"
    ELSEWHERE = "elsewhere"
    BUSY = "computing"
    TOGETHER = "under way"
    BLOCKED = "blocked"


class Standing(NamedTuple):
    """Ranks that are at the same place."""

    ranks: tuple[int, ...]
    kind: Kind
    what: str
    frames: tuple[Frame, ...]
    seconds: float
    """How long all of them have certainly been there."""
    title: str = ""
    """Of the call, if it is of an actor."""
    entered: Entered | None = None
    advice: str = ""
    uid: str = ""
    """Of their process mesh."""
    cores: float = -1.0
    children: tuple[str, ...] = ()
    """Where the child processes are that they may wait for."""

    @property
    def line(self) -> Frame | None:
        """The innermost line of the user's code."""
        return self.frames[0] if self.frames else None


class Finding(NamedTuple):
    """Ranks that wait, and what for."""

    level: Level
    cause: Cause
    waiting: tuple[Standing, ...]
    """The ranks that wait."""
    missing: tuple[Standing, ...] = ()
    """The ranks that they wait for, and where these are instead; none if they wait for each other."""
    outside: tuple[Target, ...] = ()
    """Actors of other meshes that they wait for."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that it is about."""
        return tuple(sorted({rank for each in (*self.waiting, *self.missing) for rank in each.ranks}))

    @property
    def seconds(self) -> float:
        """How long the longest wait has lasted; of ranks that wait for each other, the shortest.

        One of these that has just come there may have ended the waits of the others, which do not know it yet.
        """
        seconds = [each.seconds for each in self.waiting]
        return (max if self.missing or self.level is not Level.STUCK else min)(seconds, default=0.0)


class Diagnosis(NamedTuple):
    """The activity of all ranks, and its meaning."""

    findings: tuple[Finding, ...]
    others: tuple[Standing, ...]
    """The ranks that wait for no other one, and that none waits for."""


def diagnose(facts: Sequence[RankFacts]) -> Diagnosis:
    """Find out why ranks wait.

    Args:
        facts: the facts about all ranks that may be concerned.
    """
    parties = parties_of(facts)
    cycles = [each for each in _components(parties) if len(each) > 1]
    in_cycle = {id(party): number for number, each in enumerate(cycles) for party in each}
    behind: dict[object, list[Party]] = {}
    """By cycle or final party, the parties that wait for it in the end."""
    ends: dict[object, list[Party]] = {number: each for number, each in enumerate(cycles)}
    for party in parties:
        for final in _finals(party, in_cycle):
            key: object = in_cycle.get(id(final), id(final))
            ends.setdefault(key, [final])
            if party is not final and in_cycle.get(id(party)) is None:
                behind.setdefault(key, []).append(party)
    findings = [_of_cycle(each, behind.get(number, [])) for number, each in enumerate(cycles)]
    alone: list[Party] = []
    joint: dict[object, tuple[list[Party], list[Party]]] = {}
    for key, final in ends.items():
        if isinstance(key, int) and key < len(cycles) and final is cycles[key]:
            continue
        waiting = behind.get(key, [])
        if waiting:
            # Several ranks that keep the same ones waiting are one finding.
            same = (*sorted(map(id, waiting)), _level(final[0].members[0][1]))
            joint.setdefault(same, (waiting, []))[1].extend(final)
        else:
            alone += final
    findings += [_of_missing(waiting, missing) for waiting, missing in joint.values()]
    findings += [found for party in alone for found in _of_one(party)]
    findings.sort(key=lambda found: list(Level).index(found.level))
    return Diagnosis(tuple(_merged(findings)), tuple(_standings(party for party in alone if not _of_one(party))))


def _finals(party: Party, in_cycle: Mapping[int, int]) -> list[Party]:
    """Return the parties at the end of the waits of a party: those that wait for none, or for each other."""
    seen, left, found = {id(party)}, [party], list[Party]()
    while left:
        each = left.pop()
        if id(each) in in_cycle or not each.waits_for:
            found.append(each)
            continue
        more = [one for one in each.waits_for if id(one) not in seen]
        seen.update(map(id, more))
        left += more
    return found


def _components(parties: Sequence[Party]) -> list[list[Party]]:
    """Return the strongly connected components (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[Party] = []
    on_stack: set[int] = set()
    components: list[list[Party]] = []
    for start in parties:
        work = [(start, 0)] if id(start) not in index else []
        while work:
            party, at = work.pop()
            if at == 0:
                index[id(party)] = low[id(party)] = len(index)
                stack.append(party)
                on_stack.add(id(party))
            elif at > 0:
                low[id(party)] = min(low[id(party)], low[id(party.waits_for[at - 1])])
            while at < len(party.waits_for):
                other = party.waits_for[at]
                at += 1
                if id(other) not in index:
                    work += [(party, at), (other, 0)]
                    break
                if id(other) in on_stack:
                    low[id(party)] = min(low[id(party)], index[id(other)])
            else:
                if low[id(party)] == index[id(party)]:
                    component: list[Party] = []
                    while not component or component[-1] is not party:
                        component.append(stack.pop())
                        on_stack.discard(id(component[-1]))
                    components.append(component)
    return components


def _of_cycle(cycle: Sequence[Party], behind: Sequence[Party]) -> Finding:
    waiting = tuple(_standings([*cycle, *behind]))
    return Finding(Level.STUCK, _cause_of_cycle(cycle), waiting)


def _cause_of_cycle(cycle: Sequence[Party]) -> Cause:
    entered = [party.entered for party in cycle if party.entered is not None]
    if len(entered) < len(cycle):
        return Cause.CYCLE
    if any(each.is_message for each in entered):
        return Cause.MESSAGES
    if len({each.group for each in entered}) > 1:
        return Cause.GROUPS
    if len({each.operation for each in entered}) > 1:
        return Cause.DIFFERENT
    if len({each.root for each in entered}) > 1:
        return Cause.ROOT
    if len({each.tensors for each in entered}) > 1:
        return Cause.TENSORS
    return Cause.REDUCTION if len({each.reduction for each in entered}) > 1 else Cause.DIFFERENT


def _of_missing(waiting: Sequence[Party], missing: Sequence[Party]) -> Finding:
    outside = tuple(dict.fromkeys(target for party in missing for target in party.outside))
    doing = missing[0].doing
    level = _level(doing)
    cause = Cause.IDLE if doing.kind is Kind.IDLE else Cause.BUSY if level is Level.SLOW else Cause.ELSEWHERE
    if all(each.has_begun and not each.has_missed for each in missing):
        cause = Cause.UNLIKE
    if doing.entered is not None:
        cause = Cause.TOGETHER
    return Finding(level, cause, tuple(_standings(waiting)), tuple(_standings(missing)), outside)


def _level(doing: Doing) -> Level:
    """Return how sure it is that a rank that others wait for does not continue."""
    if doing.kind in (Kind.IDLE, Kind.DEAD, Kind.SUSPENDED) or doing.is_deadlock:
        return Level.STUCK
    if doing.kind is Kind.PAUSED:
        return Level.WAITING
    if doing.kind is Kind.PYTHON or doing.cores >= BUSY:
        return Level.SLOW
    # Without a second look, C code may compute.
    return Level.SLOW if doing.kind in COMPUTES and doing.cores < 0 else Level.WAITING


_ALONE = frozenset(
    {Kind.LOCK, Kind.EVENT, Kind.QUEUE, Kind.THREAD, Kind.CHILD, Kind.SOCKET, Kind.PIPE, Kind.FILE, Kind.ASYNC,
     Kind.SUSPENDED, Kind.GIL, Kind.SILENT, Kind.FUTURE, Kind.PAUSED, Kind.BROKEN}
)  # fmt: skip
"""Kinds that are worth a finding even if no other rank waits."""


def _of_one(party: Party) -> list[Finding]:
    """Return the finding about ranks that wait for no other rank."""
    doing = party.doing
    if party.entered is not None:
        level = Level.SLOW if party.cores >= BUSY or not party.entered.is_message else Level.WAITING
        return [Finding(level, Cause.TOGETHER, tuple(_standings([party])))]
    if doing.kind not in _ALONE or doing.cores >= BUSY:
        return []
    level = Level.STUCK if doing.kind in (Kind.SUSPENDED, Kind.BROKEN) or doing.is_deadlock else Level.WAITING
    return [Finding(level, Cause.BLOCKED, tuple(_standings([party])), (), tuple(party.outside))]


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings about single parties that do the same."""
    found: dict[object, Finding] = {}
    for each in findings:
        if each.cause is not Cause.BLOCKED:
            found[id(each)] = each
            continue
        key = each.waiting[0]._replace(ranks=(), seconds=0.0, cores=0.0), each.outside
        before = found.get(key)
        found[key] = each if before is None else each._replace(waiting=(_joined(before.waiting[0], each.waiting[0]),))
    return list(found.values())


def _joined(one: Standing, other: Standing) -> Standing:
    ranks = tuple(sorted({*one.ranks, *other.ranks}))
    return one._replace(ranks=ranks, seconds=min(one.seconds, other.seconds), cores=max(one.cores, other.cores))


def _standings(parties: Iterable[Party]) -> list[Standing]:
    """Return the places of ranks, equal ones once, in the order of their ranks."""
    found: dict[object, Standing] = {}
    for party in parties:
        for rank, doing in party.members:
            frames, entered = doing.frames, doing.entered
            each = Standing(
                (rank,), doing.kind, doing.what, frames, doing.seconds, doing.title, entered, doing.advice, party.uid,
                doing.cores, doing.children,
            )  # fmt: skip
            same = entered and (entered.operation, entered.group, entered.tensors, entered.root, entered.peers)
            key = (
                party.uid,
                doing.kind,
                doing.what,
                frames,
                "" if entered else doing.title,
                doing.advice,
                same,
                doing.children,
            )
            found[key] = _joined(found[key], each) if key in found else each
    return sorted(found.values(), key=lambda standing: (standing.uid, standing.ranks))
