"""The process groups of this process: one over all ranks of its mesh, and subgroups, created at first use."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

# torch exports these without __all__.
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from monarch._procs.os.helpers import in_helper
from monarch._tensors.collectives import checks, newcomers
from monarch._tensors.collectives.agreeing import begin_again, free_checks
from monarch._tensors.collectives.any_rank import free_receives
from monarch._tensors.collectives.connections import connected_to, open_sockets, shut_down
from monarch._tensors.collectives.interfaces import choose_interface
from monarch._tensors.collectives.made_groups import (
    all_sockets,
    connect_with,
    free_making,
    noted_sockets,
    observe_groups,
    on_renewed,
)
from monarch._tensors.collectives.nccl import ABORT_S, abort_nccl, await_aborts, free_connecting, nccl_backends
from monarch._tensors.collectives.renewed import Formers
from monarch._tensors.collectives.shared_gpus import mend_shared_gpus, share
from monarch._tensors.collectives.store import find_store, meet
from monarch._tensors.collectives.subgroups import make_subgroup, name_of_subgroup
from monarch._tensors.collectives.wrappers import reset_wrappers
from monarch._tensors.torch_compat import (
    as_it_is,
    begun,
    default_group,
    discard_group,
    group_count,
    group_names,
    groups,
    set_group_count,
)
from monarch.exceptions import GroupError

BOTH = "cpu:gloo,cuda:nccl"
_AT_ONCE = "GLOO_ENABLE_STORE_V2_API"
"""Environment variable: gloo asks the store for all addresses at once, where 64 ranks would ask it 8,000 times."""
_TIMEOUT = datetime.timedelta(minutes=30)
"""torch's default; a dead rank frees the others long before."""


class JoinInfo(NamedTuple):
    """The data that a rank needs to join."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    """Address of the machine that serves the store."""
    port: int
    own_address: str
    """Address of this machine, as the others know it."""
    device: str
    """The rank's device: ``cpu``, or the GPU by a name that is unique in the mesh."""
    gpu: int = 0
    """Number of the GPU among those that this process sees."""
    uses_gpu: bool = False
    """Whether its program has begun to use a GPU, or asked for NCCL."""


@dataclass
class World:
    """One generation of the default process group, and the groups within it."""

    place: JoinInfo
    store: Store
    devices: list[str]
    token: str
    """Unique to this generation, the same on all ranks."""
    sockets: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])
    lock: threading.Lock = field(default_factory=threading.Lock)
    turns: dict[tuple[int, ...], threading.Lock] = field(default_factory=dict[tuple[int, ...], threading.Lock])
    apart: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict[tuple[str, tuple[int, ...]], Any])
    """Groups for one purpose, by that and the ranks. Lock: the turn of the ranks."""
    making: dict[str, tuple[tuple[int, ...], set[tuple[int, int]]]] = field(
        default_factory=dict[str, tuple[tuple[int, ...], set[tuple[int, int]]]]
    )
    """Groups under creation by name: the ranks, and the sockets from before. Single operations of a dict."""
    made: set[str] = field(default_factory=set[str])
    """Names of the groups that were created. Only grows, by single operations."""
    broken: str = ""
    """Why the groups are broken; empty while they work. Set once, before connections are cut."""
    ended: Callable[[], str] = str
    """Returns why the generation has ended, also while it is formed; empty if it has not."""

    def group(self, ranks: Sequence[int]) -> Any:
        """Return the process group of some ranks, including this one; each of them must ask for it."""
        key = tuple(ranks)
        with self.lock:
            turn = self.turns.setdefault(key, threading.Lock())
        # One lock for each group: another actor of this process may wait for the members of another one.
        with turn:
            if key not in self.groups:
                self.groups[key] = in_helper(lambda: self._make(key))
            return self.groups[key]

    def group_apart(self, ranks: Sequence[int], purpose: str) -> Any:
        """Return a private process group of some ranks; each of them must ask for it.

        Args:
            ranks: including this one.
            purpose: names it; the same on all ranks.
        """
        key = tuple(ranks)
        with self.lock:
            turn = self.turns.setdefault(key, threading.Lock())
        with turn:
            found = self.apart.get((purpose, key))
            if found is None:
                found = self.apart[purpose, key] = in_helper(lambda: self._make(key, purpose))
            return found

    def _make(self, key: tuple[int, ...], purpose: str = "") -> Any:
        with as_it_is():
            return self._make_as_it_is(key, purpose)

    def _make_as_it_is(self, key: tuple[int, ...], purpose: str) -> Any:
        if not purpose and key == tuple(range(self.place.size)):
            return default_group()
        return self._make_subgroup(key, self.backend(key), self.token + purpose)

    def _make_subgroup(self, key: tuple[int, ...], backend: str, token: str) -> Any:
        name, before = name_of_subgroup(key, token), open_sockets()
        self.making[name] = key, before
        try:
            store = find_store(
                self.place.address, self.place.port, self.place.size, lambda: self.broken or self.ended()
            )
            store.set_timeout(_TIMEOUT)
            # Only its members take part, so the others stay free.
            group = make_subgroup(key, backend, store, token, _TIMEOUT)
            if reason := self.broken or self.ended():
                # It may have been made with nobody, see ``free_making``.
                discard_group(group)
                raise GroupError(reason)
            self.made.add(name)
            return group
        finally:
            self.sockets |= open_sockets() - before
            del self.making[name]

    def renew(self, formers: Formers, texts: Sequence[str]) -> None:
        """Give the groups of the last generation new connections; all ranks call this.

        Args:
            formers: the groups of this rank.
            texts: those of each rank, as text.
        """
        with as_it_is():
            formers.renew_default(self.place.size)
            for former in formers.renew_others(
                texts, lambda each: self._make_subgroup(each.ranks, each.backend, f"{self.token} {each.name}")
            ):
                if former.is_of_mesh and len(former.ranks) < self.place.size:
                    # That of all ranks is the default group, also where the mesh had more ranks before.
                    self.groups[former.ranks] = former.group
        begin_again(formers.renewed)
        newcomers.note(formers.earlier(texts), self.place.rank, self.place.size)
        reset_wrappers(formers.renewed, formers.outgrown)
        for each in on_renewed:
            each()

    def backend(self, ranks: Sequence[int]) -> str:
        """Return the backend for a group of these ranks."""
        return choose_backend([self.devices[rank] for rank in ranks])

    def position(self) -> dict[str, int]:
        """Return how many collectives this rank has begun in each group: equal for all ranks in step."""
        counts: dict[str, int] = {}
        for ranks, group in list(self.groups.items()):
            with contextlib.suppress(RuntimeError):
                counts[",".join(map(str, ranks))] = begun(group)
        return counts

    def uses_nccl(self) -> bool:
        """Return whether this process has groups whose collectives run on a GPU, and which are aborted to free it."""
        return bool(nccl_backends(groups()))

    def free(self, reason: str) -> int:
        """Free any thread that waits in a collective here, which breaks the groups; return the number of closed
        connections and of receives that belong to none.

        Args:
            reason: for threads that are about to wait.
        """
        self.broken = self.broken or reason
        free_checks(reason)
        received = free_receives(reason)
        # The first collective of NCCL waits there for the other ranks. Not counted: most ranks wait for nothing there.
        shut_down(connected_to(self.place.address, self.place.port))
        making = [open_sockets() - before for _, before in list(self.making.values())]
        # User code may have created further groups, such as those of a DeviceMesh.
        count = received + free_connecting() + shut_down(self.sockets.union(noted_sockets(), *making))
        free_making()
        return count + abort_nccl()


def counts() -> dict[str, tuple[tuple[int, ...], int]]:
    """Return by name, for each process group of this process: its members, and the collectives begun here."""
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for group, name in group_names():
        # Backends without a count are not compared, nor are groups in the moment when they are made or destroyed.
        with contextlib.suppress(RuntimeError, KeyError, ValueError):
            found[name] = tuple(dist.get_process_group_ranks(group)), begun(group)
    return found


def choose_backend(devices: Sequence[str]) -> str:
    """Return NCCL if each rank has a GPU of its own, plus gloo for CPU tensors; else gloo."""
    of_their_own = "cpu" not in devices and len(set(devices)) == len(devices)
    return BOTH if of_their_own and dist.is_nccl_available() else "gloo"


def form(place: JoinInfo, store: Store, known: Formers, ended: Callable[[], str] = str) -> World:
    """Join the default process group, together with all other ranks of the mesh.

    Args:
        place: the place of this rank.
        store: for the rendezvous.
        known: the groups of the last generation, which get the new connections; they stay there if that fails.
        ended: returns why the generation has ended; empty if it has not.

    Raises:
        GroupError: other ranks did not join, or the group could not be created.
    """
    formers = known.take()
    made: set[str] = set()
    try:
        return _form(place, store, known, formers, made, ended)
    except BaseException:
        known.keep(formers, made)
        raise


def _form(
    place: JoinInfo, store: Store, known: Formers, formers: Formers, made: set[str], ended: Callable[[], str]
) -> World:
    choose_interface(place.own_address)
    observe_groups()
    os.environ.setdefault(_AT_ONCE, "1")
    says = [place.device, _default_group(), secrets.token_hex(4), formers.text(), checks.setting(), str(group_count())]
    texts = meet(store, place.rank, place.size, "\n".join([*says, "gpu" if place.uses_gpu else ""]))
    devices, own_groups, tokens, groups, settings, named, users = zip(
        *(each.split("\n") for each in texts), strict=True
    )
    devices, token = list(devices), tokens[0]
    if share(devices):
        mend_shared_gpus()
    # Ranks that are newer than the setting do not know it.
    checks.adopt(list(settings))
    if any(own_groups):
        wrong = [rank for rank, each in enumerate(own_groups) if each != f"{rank} of {place.size}"]
        if wrong:
            raise GroupError(
                f"the program's default process group does not match the ranks of the mesh: "
                f"rank {wrong[0]} of {place.size} is rank {own_groups[wrong[0]] or 'none'} in it; call "
                f"dist.destroy_process_group() to use the mesh's groups"
            )
        world = World(place, store, devices, token, all_sockets([place.address, place.own_address]))
        world.group(range(place.size))
        return world
    before = open_sockets()
    # Alike on all ranks, since each waits for the others. A program without GPUs gets no memory of one.
    connect_with(place.gpu if any(users) and choose_backend(devices) == BOTH else None)
    # torch names the group by it. Where the last one failed on some ranks only, they would wait for different names.
    set_group_count(max(map(int, named)))
    try:
        dist.init_process_group(
            choose_backend(devices),
            store=PrefixStore("default", store),
            rank=place.rank,
            world_size=place.size,
            timeout=_TIMEOUT,
        )
    except RuntimeError as error:
        raise GroupError(f"cannot create the process group on rank {place.rank}: {error}") from error
    world = World(place, store, devices, token, made=made, ended=ended)
    try:
        world.renew(formers, groups)
        world.sockets = open_sockets() - before
        world.group(range(place.size))
    except BaseException as error:
        world.sockets = open_sockets() - before
        # The next generation would take a default group that is left for one of the program.
        world.groups[tuple(range(place.size))] = default_group()
        leave(world, known)
        if isinstance(error, RuntimeError):
            raise GroupError(f"cannot recreate the process groups of rank {place.rank}: {error}") from error
        raise
    return world


def _default_group() -> str:
    """Return the place in a default process group that the program has created, as ``rank of size``; empty for none."""
    group = default_group()
    return f"{group.rank()} of {group.size()}" if group is not None else ""


def leave(world: World, formers: Formers) -> None:
    """Destroy the groups, so that new ones can be created; a default group that the program has created since stays.

    Args:
        world: the world of the groups.
        formers: takes note of the groups.
    """
    group = default_group()
    if group is not None and group is world.groups.get(tuple(range(world.place.size))):
        # Abort first, since destroying waits for work in progress.
        world.free("the process group was destroyed; use the group again")
        await_aborts(ABORT_S)
        with as_it_is():
            formers.note(set(map(id, world.groups.values())), set(map(id, world.apart.values())))
            dist.destroy_process_group()
            # Groups that the program makes by itself connect as it wants.
            connect_with(None)


def torchrun_variables(place: JoinInfo) -> dict[str, str]:
    """Return torchrun's environment for its workers, for programs that create their process group themselves."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.rank // place.local_size),
        "GROUP_WORLD_SIZE": str(-(-place.size // place.local_size)),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
