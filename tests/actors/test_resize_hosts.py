"""Meshes of several hosts grow and shrink by whole hosts, also after a host is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leaks import Kit, wait_until
from meshes import values
from monarch._node.current import current_node
from monarch.actor import Actor, HostMesh, Role, context, current_rank, endpoint, heal_mesh, supervise
from monarch.exceptions import ArgumentError, ShapeError, SupervisionError
from monarch.testing import local_hosts

pytestmark = pytest.mark.slow


class Member(Actor):
    def __init__(self) -> None:
        self.count = 0
        self.told: list[tuple[dict[str, int], dict[str, int]]] = []

    def __resized__(self, old: dict[str, int], new: dict[str, int]) -> None:
        self.told.append((old, new))

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    def who(self) -> tuple[int, int, str | None, str]:
        place = context().actor_instance.rank
        return current_rank().rank, place.extent.nelements, os.environ.get("ROLE"), current_node().host

    @endpoint
    def resizes(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        return self.told

    @endpoint
    def total(self) -> float:
        import torch
        import torch.distributed as dist

        from monarch.distributed import group

        here = torch.tensor([float(current_rank().rank + 1)])
        dist.all_reduce(here, group=group())
        return here.item()

    @endpoint
    def agent(self) -> int:
        """Return the pid of the agent of this host, which adopts the forked ranks."""
        return os.getppid()


@pytest.fixture
def hosts(host: object, leaks: Kit) -> Iterator[HostMesh]:
    with local_hosts(1):
        # The first that is attached leaves what the others use too.
        leaks.rebase()
    with local_hosts(3) as found:
        yield found


def lose(mesh: Any, members: Any, at: int) -> None:
    """Kill the agent of a host, and wait until the program knows."""
    state = mesh._state.procs
    pid = members.slice(hosts=at, gpus=0).agent.call_one().get(30)
    os.kill(pid, signal.SIGKILL)
    rank = at * state.per_host
    assert wait_until(lambda: mesh._node.peers.get(state.proc(rank)).dead is not None)


def test_a_mesh_grows_onto_hosts_and_leaves_them(hosts: HostMesh) -> None:
    roles = {"train": Role(1, env={"ROLE": "train"}), "load": Role(1, env={"ROLE": "load"})}
    mesh = hosts.slice(hosts=slice(0, 2)).spawn_procs(roles=roles, name="mesh", spares=1)
    members: Any = mesh.spawn("members", Member)
    assert values(members.add.call()) == [1] * 4 and values(members.total.call()) == [10.0] * 4
    with pytest.raises(ShapeError, match=r"along 'hosts' it needs 1 more: mesh\.resize\(more"):
        mesh.resize(hosts=3)
    with pytest.raises(ShapeError, match="it needs 2 more"):
        mesh.resize(hosts, hosts=4)
    with pytest.raises(ShapeError, match="only the first axis"):
        mesh.resize(hosts, procs=3)
    with pytest.raises(ArgumentError, match="expected a mesh of hosts and axis sizes, got int"):
        mesh.resize(3)  # pyright: ignore[reportArgumentType]
    # The hosts that it is on are passed over.
    assert mesh.resize(hosts, hosts=3).sizes == members.sizes == {"hosts": 3, "procs": 2}
    assert values(members.add.call()) == [2] * 4 + [1] * 2 and values(members.total.call()) == [21.0] * 6
    seen = values(members.who.call())
    assert [each[:3] for each in seen] == [(rank, 6, ("train", "load")[rank % 2]) for rank in range(6)]
    assert len({each[3] for each in seen}) == 3 and len(mesh.host_mesh) == 3
    assert values(members.resizes.call())[3:] == [[({"hosts": 2, "procs": 2}, {"hosts": 3, "procs": 2})], [], []]
    assert len(mesh.role("load")) == 3
    mesh.resize(hosts=1)
    assert values(members.add.call()) == [3] * 2 and values(members.total.call()) == [3.0] * 2
    assert list(mesh._state.starting.spares) == [mesh._state.procs.hosts[0]]  # pyright: ignore[reportOptionalMemberAccess]
    # Back, in another order of hosts.
    last = hosts.slice(hosts=2)
    mesh.resize(last, hosts=2)
    assert values(members.who.call())[2][3] == last._hosts[2] and values(members.total.call()) == [10.0] * 4
    mesh.stop().get(30)


def test_mesh_is_usable_after_losing_hosts(hosts: HostMesh) -> None:
    mesh = hosts.spawn_procs({"gpus": 2}, name="mesh")
    members: Any = mesh.spawn("members", Member)
    assert values(members.add.call()) == [1] * 6 and values(members.total.call()) == [21.0] * 6
    with supervise(mesh):
        # Not the last one: the last host takes its place.
        lose(mesh, members, 1)
        with pytest.raises(ShapeError, match="it needs 1 more"):
            mesh.resize(hosts, hosts=4)
        mesh.resize(hosts=2)
        assert values(members.slice(hosts=0).resizes.call())[0] == [({"hosts": 3, "gpus": 2}, {"hosts": 2, "gpus": 2})]
        with (
            local_hosts(2) as more,
            pytest.raises(SupervisionError, match=r"dead ranks \(ranks 2-3\); call heal_mesh before"),
        ):
            mesh.resize(more, hosts=3)
        heal_mesh(mesh, hosts=hosts)
    assert values(members.add.call()) == [2, 2, 1, 1] and values(members.total.call()) == [10.0] * 4
    with supervise(mesh):
        # The last one: nothing has to take its place.
        lose(mesh, members, 1)
        mesh.resize(hosts=1)
    assert values(members.add.call()) == [3, 3] and values(members.total.call()) == [3.0] * 2
    mesh.stop().get(30)


def test_a_mesh_without_hosts_stays_where_it_is(procs: Callable[..., Any], hosts: HostMesh) -> None:
    mesh = procs(1, name="mesh")
    with pytest.raises(ArgumentError, match=r"mesh has no hosts axis \(gpus=1\)"):
        mesh.resize(hosts, gpus=2)
    mesh.resize(gpus=2).stop().get(30)
