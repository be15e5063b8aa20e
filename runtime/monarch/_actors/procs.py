"""Which processes a mesh of procs has: a formula and not a list, so that references to it are small."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from monarch._core.extent import Extent
from monarch._core.region import Region


class _Life:
    """What the references to one mesh in this process have in common: how often each rank was replaced."""

    __slots__ = ("__weakref__", "generation", "incarnations")

    def __init__(self) -> None:
        self.incarnations: dict[int, int] = {}
        self.generation = 0


_lives: WeakValueDictionary[str, _Life] = WeakValueDictionary()
_lock = Lock()


class Procs:
    """The processes of one ``spawn_procs``, by base rank.

    Args:
        uid: unique in the session; a single proc id, if it is a mesh of one process that was not spawned.
        name: for people.
        hosts: host id of each host, in the order of its mesh.
        per_host: how many procs each of them has.
        labels: axes of the whole mesh.
        sizes: their sizes.
        host_axes: how many of these axes are those of the hosts.
        owner: proc id of the process that spawned it.
        incarnations: of ranks whose process was replaced, how often: each has a proc id of its own. What is newer than
            what this process knows holds for all references that it has.
    """

    __slots__ = (
        "_life",
        "host_axes",
        "hosts",
        "labels",
        "name",
        "owner",
        "per_host",
        "sizes",
        "uid",
    )

    def __init__(
        self,
        uid: str,
        name: str,
        hosts: tuple[str, ...],
        per_host: int,
        labels: tuple[str, ...],
        sizes: tuple[int, ...],
        host_axes: int,
        owner: str,
        incarnations: dict[int, int] | None = None,
    ) -> None:
        self.uid = uid
        self.name = name
        self.hosts = hosts
        self.per_host = per_host
        self.labels = labels
        self.sizes = sizes
        self.host_axes = host_axes
        self.owner = owner
        with _lock:
            life = _lives.get(uid)
            if life is None:
                life = _lives[uid] = _Life()
            self._life = life
        self.learn(incarnations or {})

    @property
    def incarnations(self) -> dict[int, int]:
        """Of ranks whose process was replaced, how often, as far as this process knows."""
        return self._life.incarnations

    @property
    def generation(self) -> int:
        """Grows with each replacement that this process learns of, so that it can be seen that there was one."""
        return self._life.generation

    def learn(self, incarnations: Mapping[int, int]) -> None:
        """Takes note of processes that were replaced, for all references to this mesh in this process."""
        known = self._life.incarnations
        newer = {rank: count for rank, count in incarnations.items() if count > known.get(rank, 0)}
        if newer:
            known.update(newer)
            self._life.generation += 1

    def region(self) -> Region:
        """All of them."""
        return Region.full(Extent(self.labels, self.sizes))

    def proc(self, rank: int) -> str:
        """The proc id of a base rank."""
        if "/" in self.uid:
            return self.uid
        again = self.incarnations.get(rank)
        return f"{self.hosts[rank // self.per_host]}/{self.uid}.{rank}" + (f"~{again}" if again else "")

    def rank_of(self, proc: str) -> int:
        """The base rank of a proc id."""
        return 0 if "/" in self.uid else split_proc(proc)[1]

    def host_region(self) -> Region:
        """The hosts, by their axes."""
        return Region.full(Extent(self.labels[: self.host_axes], self.sizes[: self.host_axes]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Procs) and self.uid == other.uid

    def __hash__(self) -> int:
        return hash(self.uid)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the incarnations: they may change while this is pickled.
        return Procs, (
            self.uid,
            self.name,
            self.hosts,
            self.per_host,
            self.labels,
            self.sizes,
            self.host_axes,
            self.owner,
            dict(self.incarnations),
        )


def split_proc(proc: str) -> tuple[str, int]:
    """The uid of the mesh that a proc is of, and its base rank there; empty and 0 for the program."""
    uid, _, rank = proc.partition("/")[2].rpartition(".")
    return (uid, int(rank.partition("~")[0])) if uid else ("", 0)
