"""Which GPUs of a host each mesh uses: each rank sees all GPUs, those of its mesh first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from monarch._core.roster import split_proc

ORDER = "MONARCH_GPUS"
"""Environment variable of isolated ranks: all GPUs in the order of the mesh, since a spare may take any place."""


class _Share(NamedTuple):
    """The GPUs of one mesh."""

    title: str
    order: list[str]
    """All GPUs, those of the mesh first."""
    ranks: int
    """The number of its ranks on this host."""

    def loads(self) -> Counter[str]:
        """Return how many ranks use each GPU."""
        return Counter(self.order[index % len(self.order)] for index in range(self.ranks))


class GpuShares:
    """The GPUs of the meshes that have processes on this host. For the agent's one thread."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        """By uid of the mesh."""

    def keep(self, procs: Collection[str]) -> None:
        """Forget meshes without any of these processes."""
        living = {split_proc(proc)[0] for proc in procs}
        self._shares = {uid: share for uid, share in self._shares.items() if uid in living}

    def order(self, uid: str, title: str, names: Sequence[str], count: int) -> list[str]:
        """Return all GPUs in the order of a mesh, the least used ones first.

        Args:
            uid: the uid of the mesh; a known one with the same GPUs keeps its order.
            title: its name.
            names: the GPUs that its ranks may use.
            count: how many ranks it has on this host.
        """
        known = self._shares.pop(uid, None)
        order = known.order if known is not None else []
        if sorted(order) != sorted(names):
            order = arrange(names, count, self._loads())
        self._shares[uid] = _Share(title, order, count)
        return order

    def _loads(self) -> Counter[str]:
        loads = Counter[str]()
        for share in self._shares.values():
            loads += share.loads()
        return loads

    def sharers(self, uid: str) -> dict[str, list[str]]:
        """Return the GPUs that a mesh shares: for each, the names of the meshes of its ranks, this one's first."""
        own = self._shares.get(uid)
        if own is None:
            return {}
        titles_of = {gpu: [own.title] * load for gpu, load in own.loads().items()}
        for other in [share for key, share in self._shares.items() if key != uid]:
            for gpu in titles_of.keys() & other.loads().keys():
                titles_of[gpu].append(other.title)
        return {gpu: titles for gpu, titles in sorted(titles_of.items()) if len(titles) > 1}


def arrange(names: Sequence[str], count: int, loads: Mapping[str, int]) -> list[str]:
    """Return GPUs with the ``count`` least used ones first, otherwise in their order."""
    least = sorted(names, key=lambda name: (loads.get(name, 0), names.index(name)))[:count]
    return [name for name in names if name in least] + [name for name in names if name not in least]


def variables(order: Sequence[str], names: Sequence[str], index: int, isolate: bool) -> dict[str, str]:
    """Return the environment variables that give a rank its GPUs.

    Args:
        order: all GPUs, those of the mesh first.
        names: all GPUs as a process without these variables sees them.
        index: the rank's number on this host.
        isolate: whether it sees only its own.
    """
    if isolate:
        return {"CUDA_VISIBLE_DEVICES": order[index % len(order)], ORDER: ",".join(order)}
    return {} if list(order) == list(names) else {"CUDA_VISIBLE_DEVICES": ",".join(order)}
