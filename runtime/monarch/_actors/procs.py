"""Which processes a mesh of procs has: a formula and not a list, so that references to it are small."""

from __future__ import annotations

from typing import Any

from monarch._core.extent import Extent
from monarch._core.region import Region


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
        incarnations: of ranks whose process was replaced, how often: each has a proc id of its own.
    """

    __slots__ = (
        "generation",
        "host_axes",
        "hosts",
        "incarnations",
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
        self.incarnations = incarnations or {}
        self.generation = 0
        """Grows with each replacement, so that it can be seen that there was one."""

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
        return Procs, tuple(
            getattr(self, name)
            for name in ("uid", "name", "hosts", "per_host", "labels", "sizes", "host_axes", "owner", "incarnations")
        )


def split_proc(proc: str) -> tuple[str, int]:
    """The uid of the mesh that a proc is of, and its base rank there; empty and 0 for the program."""
    uid, _, rank = proc.partition("/")[2].rpartition(".")
    return (uid, int(rank.partition("~")[0])) if uid else ("", 0)
