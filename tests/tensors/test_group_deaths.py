"""Deaths while a group is created: the others end their wait, wherever in its creation they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, endpoint, heal_mesh, supervise
from monarch.distributed import group
from monarch.exceptions import ActorError


class Member(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def count(self) -> int:
        return group().size()

    @endpoint
    def wait_in_store(self, begun: str) -> None:
        """Wait as the first collective of NCCL does for the id of its communicator."""
        from torch.distributed import distributed_c10d

        group()
        Path(begun).touch()
        distributed_c10d._get_default_store().get("never")  # pyright: ignore[reportPrivateUsage]

    @endpoint
    def connect_late(self, mesh: Any, connecting: str, again: bool) -> int:
        """Ask for a group, and connect to its store only once this rank knows that the groups are broken."""
        from monarch._groups.rendezvous import local_rendezvous
        from monarch._tensors.collectives import store, world

        module: Any = world if again else store
        find = module.find_store

        def late(*args: Any) -> Any:
            Path(connecting).touch()
            while not local_rendezvous().broken:
                time.sleep(0.002)
            return find(*args)

        module.find_store = late
        try:
            return mesh.group().size()
        finally:
            module.find_store = find


# Rank 0 serves the store.
@pytest.mark.parametrize(
    ("victim", "again"), [(0, False), (0, True), (1, True)], ids=["0-first-group", "0-subgroup", "1-subgroup"]
)
def test_death_before_the_connection_frees_the_rank(
    procs: Callable[..., Any], tmp_path: Path, victim: int, again: bool
) -> None:
    mesh, connecting = procs(3), tmp_path / "connecting"
    members = mesh.spawn("members", Member)
    pids = list(members.pid.call().get(30).values())
    if again:
        assert list(members.count.call().get(60).values()) == [3] * 3
    late = members.slice(gpus=1 - victim).connect_late.call(mesh.slice(gpus=slice(0, 2)), str(connecting), again)
    assert wait_until(connecting.exists)
    with supervise(mesh):
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(ActorError, match=f"is broken because rank {victim} died"):
            late.get(30)
    heal_mesh(mesh)
    assert list(members.count.call().get(60).values()) == [3] * 3


@pytest.mark.parametrize("waiter", [0, 1])
def test_death_frees_a_rank_that_waits_in_the_store(procs: Callable[..., Any], tmp_path: Path, waiter: int) -> None:
    mesh, begun = procs(3), tmp_path / "begun"
    members = mesh.spawn("members", Member)
    pids = list(members.pid.call().get(30).values())
    assert list(members.count.call().get(60).values()) == [3] * 3
    waits = members.slice(gpus=waiter).wait_in_store.call(str(begun))
    assert wait_until(begun.exists)
    with supervise(mesh):
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(ActorError, match="is broken because rank 2 died"):
            waits.get(30)
    heal_mesh(mesh)
    assert list(members.count.call().get(60).values()) == [3] * 3
