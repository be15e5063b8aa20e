"""The processes of a mesh: a formula with exceptions rather than a list, so that references to it are small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

from monarch._core.shapes.extent import Extent, axes_text
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.shapes.region import Region
from monarch.exceptions import StoppedError


@dataclass(frozen=True)
class Roster:
    """The processes of a mesh at one time. Only the owner changes it, so the newest version is right."""

    version: int
    hosts: tuple[str, ...]
    """Host id of each host, in the order of its mesh."""
    per_host: int
    """Number of procs on each host."""
    sizes: tuple[int, ...]
    """Extent of the whole mesh."""
    names: Mapping[int, str] = field(default_factory=dict[int, str])
    """By rank, processes not named ``<uid>.<rank>``: replacements of others."""

    def proc(self, uid: str, rank: int) -> str:
        """Return the proc id of a base rank of the mesh of this uid."""
        if rank >= len(self.hosts) * self.per_host:
            # A view from before the mesh shrank: a removed rank must not resolve to another process.
            return f"{self.hosts[-1]}/{uid}.{rank}~gone"
        return f"{self.hosts[rank // self.per_host]}/{self.names.get(rank) or f'{uid}.{rank}'}"


class _Life:
    """State shared by the references to one mesh in this process."""

    __slots__ = ("__weakref__", "ranks", "region", "roster", "views")

    def __init__(self, roster: Roster) -> None:
        # These three are written under _lock; a roster and a region never change.
        self.roster = roster
        self.region: Region | None = None
        """All of its processes; None until first use."""
        self.ranks = {name: rank for rank, name in roster.names.items()}
        """Ranks of processes with names of their own, replaced ones included."""
        self.views: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """Meshes on all of its processes; they follow a resize."""


_lives: WeakValueDictionary[str, _Life] = WeakValueDictionary()
_lock = RLock()


class Procs:
    """The processes of one ``spawn_procs``, by base rank.

    All references in a process share what one of them learns of changes.

    Args:
        uid: unique in the session; a single proc id for a mesh of one process that was not spawned.
        name: display name.
        labels: axes of the whole mesh.
        host_axes: how many of these axes are host axes.
        owner: proc id of the process that spawned it.
        roster: the processes, as far as the sender of this reference knows.
    """

    __slots__ = ("_life", "host_axes", "labels", "name", "owner", "uid")

    def __init__(
        self, uid: str, name: str, labels: tuple[str, ...], host_axes: int, owner: str, roster: Roster
    ) -> None:
        self.uid = uid
        self.name = name
        self.labels = labels
        self.host_axes = host_axes
        self.owner = owner
        with _lock:
            life = _lives.get(uid)
            if life is None:
                life = _lives[uid] = _Life(roster)
            self._life = life
        self.learn(roster)

    @property
    def roster(self) -> Roster:
        """The processes, as far as this process knows."""
        return self._life.roster

    @property
    def version(self) -> int:
        """Number of changes that this process knows of."""
        return self._life.roster.version

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host id of each host, in the order of its mesh."""
        return self._life.roster.hosts

    @property
    def per_host(self) -> int:
        """Number of procs on each host."""
        return self._life.roster.per_host

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent of the axes."""
        return self._life.roster.sizes

    @property
    def size(self) -> int:
        """Number of procs."""
        roster = self._life.roster
        return len(roster.hosts) * roster.per_host

    def learn(self, roster: Roster) -> None:
        """Apply a change, unless a newer one is known."""
        life = self._life
        with _lock:
            if roster.version <= life.roster.version:
                return
            sizes = life.roster.sizes
            life.ranks.update({name: rank for rank, name in roster.names.items()})
            life.roster, life.region = roster, None
        if sizes != roster.sizes:
            for view in list(life.views.values()):
                view._follow()

    def follow(self, view: Any) -> None:
        """Keep a mesh that is on all processes on all of them."""
        self._life.views[id(view)] = view

    def keep(self, thing: Any) -> None:
        """Keep something as long as one of the meshes on all processes that there are now."""
        for view in list(self._life.views.values()):
            view._kept = thing

    # Changes, made by the owner

    def replaced(self, names: Mapping[int, str], hosts: Mapping[str, str]) -> Roster:
        """Return the roster for ``learn`` when other processes, or other hosts, replace some.

        Args:
            names: by rank, the name of a running process; an empty one makes up a new name.
            hosts: replacements, by the hosts that leave.
        """
        now = self.roster
        version = now.version + 1
        made = {rank: name or f"{self.uid}.{rank}~{version}" for rank, name in names.items()}
        new_hosts = tuple(hosts.get(host, host) for host in now.hosts)
        return replace(now, version=version, hosts=new_hosts, names={**now.names, **made})

    def resized(self, hosts: Sequence[str], per_host: int, sizes: Sequence[int]) -> Roster:
        """Return the roster for ``learn`` when the first axis grows or shrinks: procs at its end are new or gone."""
        now = self.roster
        version, count, old = now.version + 1, len(hosts) * per_host, self.size
        names = {rank: name for rank, name in now.names.items() if rank < count}
        # A removed process must not be taken for a new one of its rank.
        names.update({rank: f"{self.uid}.{rank}~{version}" for rank in range(old, count)})
        return Roster(version, tuple(hosts), per_host, tuple(sizes), names)

    # Lookup

    def region(self) -> Region:
        """Return all of them."""
        life = self._life
        region = life.region
        if region is None:
            with _lock:
                # Otherwise the processes of an outdated roster could be cached.
                region = life.region = Region.full(Extent(self.labels, life.roster.sizes))
        return region

    def host(self, rank: int) -> str:
        """Return the id of the host of a base rank."""
        roster = self._life.roster
        return roster.hosts[rank // roster.per_host]

    def proc(self, rank: int) -> str:
        """Return the proc id of a base rank."""
        return self.uid if "/" in self.uid else self._life.roster.proc(self.uid, rank)

    def check(self, region: Region, name: str) -> None:
        """StoppedError: ranks of a view are gone, since the mesh has shrunk."""
        gone = [rank for rank in region.base_ranks() if rank >= self.size] if self.version else []
        if gone:
            raise StoppedError(
                f"{describe_ranks(gone)} of {name} left when the mesh was resized to "
                f"{axes_text(self.region().extent)}; take a new slice",
                mesh=name,
            )

    def rank_of(self, proc: str) -> int:
        """Return the base rank of a proc id, replaced ones included."""
        return 0 if "/" in self.uid else split_proc(proc)[1]

    def has(self, proc: str) -> bool:
        """Return whether a process belongs to this mesh now: neither replaced nor removed."""
        rank = self.rank_of(proc)
        return rank < self.size and self.proc(rank) == proc

    def host_region(self) -> Region:
        """Return the hosts, by their axes."""
        return Region.full(Extent(self.labels[: self.host_axes], self.sizes[: self.host_axes]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Procs) and self.uid == other.uid

    def __hash__(self) -> int:
        return hash(self.uid)

    def __reduce__(self) -> tuple[Any, ...]:
        return Procs, (self.uid, self.name, self.labels, self.host_axes, self.owner, self.roster)


def split_proc(proc: str) -> tuple[str, int]:
    """Return the mesh uid and base rank of a proc; empty and 0 for the program."""
    name = proc.partition("/")[2]
    uid, _, rank = name.rpartition(".")
    if not uid:
        return "", 0
    life = _lives.get(uid)
    known = life.ranks.get(name) if life is not None else None
    if known is None:
        digits = rank.partition("~")[0]
        known = int(digits) if digits.isdecimal() else 0
    return uid, known
