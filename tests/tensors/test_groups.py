"""Process groups of meshes and slices: their members, and what happens when a rank dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from leaks import Kit, wait_until
from monarch.actor import Actor, current_rank, endpoint, heal_mesh, supervise
from monarch.distributed import device_mesh, group
from monarch.exceptions import ActorError, AxisError, DeviceMeshError, GroupError, SupervisionError


class Member(Actor):
    @endpoint
    def total(self, *axes: str) -> float:
        return self._sum(group(*axes))

    @endpoint
    def total_in(self, given: Any) -> float:
        return self._sum(given)

    @endpoint
    def total_of(self, mesh: Any, *axes: str) -> float:
        return self._sum(mesh.group(*axes))

    @endpoint
    def total_after(self, mesh: Any, seed: str) -> float:
        """After a pause of different length on each rank."""
        time.sleep(random.Random(f"{seed} {current_rank().rank}").random() * 0.004)
        return self._sum(mesh.group())

    @endpoint
    def making(self) -> bool:
        """Whether a group is being created here."""
        from monarch._groups.rendezvous import local_rendezvous

        world = local_rendezvous().world
        return world is not None and bool(world.making)

    def _sum(self, given: Any) -> float:
        import torch
        import torch.distributed as dist

        here = torch.tensor([float(current_rank().rank)])
        dist.all_reduce(here, group=given)
        return here.item()

    @endpoint
    def generation(self) -> int:
        """That of the groups of this rank, if they work; else 0."""
        from monarch._groups.rendezvous import local_rendezvous

        return local_rendezvous().usable_generation()

    @endpoint
    def cut(self) -> int:
        """Break the connections of this rank, as a network fault does; return how many."""
        from monarch._tensors.collectives.connections import open_sockets, shut_down

        return shut_down(open_sockets())

    @endpoint
    def mesh(self) -> tuple[Any, ...]:
        import torch.distributed as dist

        found = device_mesh()
        return found.mesh_dim_names, tuple(found.shape), found.get_coordinate(), dist.get_world_size()

    @endpoint
    def mesh_given(self, found: Any) -> tuple[Any, ...]:
        return found.mesh_dim_names, tuple(found.shape)

    @endpoint
    def along(self, axis: str) -> bool:
        return device_mesh()[axis].get_group() is group(axis)

    @endpoint
    def wait_for_others(self, absent: int) -> float:
        """A collective that one rank does not join."""
        import torch
        import torch.distributed as dist

        given = group()
        if current_rank().rank == absent:
            signal.pause()
        dist.all_reduce(torch.ones(1), group=given)
        return 1.0

    @endpoint
    def busy_until(self, path: str) -> None:
        import time

        while not os.path.exists(path):
            time.sleep(0.01)

    @endpoint
    def own_group(self) -> None:
        import torch.distributed as dist

        path = os.environ["MEETING"]
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=current_rank().rank, world_size=2)

    @endpoint
    def end_group(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    @endpoint
    def form_slowly(self, first: int) -> int:
        """One rank asks for the group while the others are creating it."""
        import time

        import torch.distributed as dist

        make = dist.init_process_group

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.25)
            return make(*args, **options)

        dist.init_process_group = slow  # type: ignore[assignment]
        try:
            if current_rank().rank != first:
                time.sleep(0.2)
            return group().size()
        finally:
            dist.init_process_group = make  # type: ignore[assignment]

    @endpoint
    def sum_under_way(self) -> Any:
        import time

        import torch
        import torch.distributed._functional_collectives as collectives

        given = group()
        if current_rank().rank == 1:
            time.sleep(0.3)
        return collectives.all_reduce(torch.full((4,), current_rank().rank + 1.0), "sum", given)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def values(future: Any) -> list[Any]:
    return list(future.get(60).values())


def test_groups_exist_for_each_axis_and_for_all(procs: Callable[..., Any]) -> None:
    members = procs({"dp": 2, "tp": 2}).spawn("members", Member)
    assert values(members.total.call()) == [6.0] * 4
    assert values(members.total.call("dp")) == [2.0, 4.0, 2.0, 4.0]
    assert values(members.total.call("tp")) == [1.0, 1.0, 5.0, 5.0]
    assert values(members.total.call("dp", "tp")) == [6.0] * 4
    with pytest.raises(ActorError, match="no axis 'pp'; this mesh has dp=2, tp=2") as caught:
        members.total.call("pp").get()
    assert isinstance(caught.value.exception, AxisError)


def test_groups_of_three_axes_and_of_two(procs: Callable[..., Any]) -> None:
    members = procs({"a": 1, "b": 2, "c": 2}).spawn("members", Member)
    assert values(members.total.call("b", "c")) == [6.0] * 4
    assert values(members.total.call("a", "c")) == [1.0, 1.0, 5.0, 5.0]


def test_device_mesh_has_axes_of_mesh(procs: Callable[..., Any]) -> None:
    mesh = procs({"dp": 2, "tp": 2})
    members = mesh.spawn("members", Member)
    assert values(members.mesh.call()) == [(("dp", "tp"), (2, 2), at, 4) for at in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert values(members.along.call("tp")) == [True] * 4
    assert values(members.mesh_given.call(mesh.device_mesh())) == [(("dp", "tp"), (2, 2))] * 4


def test_program_can_pass_groups_to_ranks(procs: Callable[..., Any]) -> None:
    mesh = procs({"dp": 2, "tp": 2})
    members = mesh.spawn("members", Member)
    assert "to be sent to its ranks" in repr(mesh.group("tp"))
    assert values(members.total_in.call(mesh.group("tp"))) == [1.0, 1.0, 5.0, 5.0]
    # Of another shape of the same ranks.
    assert values(members.total_of.call(mesh.flatten("all"))) == [6.0] * 4
    half = members.slice(dp=1)
    assert values(half.total_of.call(mesh.slice(dp=1), "tp")) == [1.0, 1.0]
    with pytest.raises(AxisError):
        mesh.group("pp")


def test_slice_has_its_group_while_others_are_busy(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(4)
    everybody = mesh.spawn("everybody", Member)
    done = tmp_path / "done"
    busy = everybody.slice(gpus=slice(2, 4)).busy_until.call(str(done))
    half = mesh.slice(gpus=slice(0, 2)).spawn("half", Member)
    assert values(half.total.call()) == [1.0, 1.0]
    assert values(half.mesh.call())[0] == (("gpus",), (2,), (0,), 4)
    done.touch()
    busy.get(60)
    assert values(everybody.total.call()) == [6.0] * 4


@pytest.mark.parametrize("first", [0, 1])
def test_late_rank_joins_the_same_generation(procs: Callable[..., Any], first: int) -> None:
    members = procs(2).spawn("members", Member)
    assert values(members.form_slowly.call(first)) == [2, 2]
    assert values(members.total.call()) == [1.0, 1.0]


def test_async_result_is_sent_after_its_collective(procs: Callable[..., Any]) -> None:
    members = procs(2).spawn("members", Member)
    members.total.call().get(30)
    assert [each.tolist() for each in values(members.sum_under_way.call())] == [[3.0] * 4] * 2


def test_group_of_slice_rejects_other_ranks(procs: Callable[..., Any]) -> None:
    mesh, other = procs(2), procs(1)
    with pytest.raises(ActorError, match="not a rank of"):
        mesh.spawn("members", Member).total_of.call(other).get(30)
    with pytest.raises(ActorError, match="not in this slice of it"):
        mesh.spawn("members", Member).slice(gpus=1).total_of.call(mesh.slice(gpus=0)).get(30)


def test_group_of_one_rank_works(procs: Callable[..., Any]) -> None:
    member = procs(1).spawn("member", Member)
    assert values(member.total.call()) == [0.0]
    alone = procs({}).spawn("alone", Member)
    assert values(alone.mesh.call()) == [(("ranks",), (1,), (0,), 1)]


def test_program_is_not_a_rank() -> None:

    from monarch._groups.convening import ensure_world

    for ask in (ensure_world, group, device_mesh):
        with pytest.raises(GroupError, match="the program has no process groups"):
            ask()


def test_actors_of_one_process_ask_for_different_groups(procs: Callable[..., Any]) -> None:
    mesh = procs({"dp": 2, "tp": 2})
    first, second = mesh.spawn("first", Member), mesh.spawn("second", Member)
    first.pid.call().get()
    # Each rank creates its groups in another order, which does not matter for different actors.
    views = [mesh.slice(dp=0), mesh.slice(tp=0)]
    for _ in range(3):
        by_rows = first.slice(dp=0).total_of.call(views[0])
        by_columns = second.slice(tp=0).total_of.call(views[1])
        assert values(by_rows) == [1.0, 1.0] and values(by_columns) == [1.0, 1.0]


def test_members_with_different_group_history_can_join(procs: Callable[..., Any]) -> None:
    mesh = procs(4)
    members = mesh.spawn("members", Member)
    # One of ranks 0 and 2 has created a group before, the other has not.
    for part in (slice(0, 2), slice(0, 4, 2), slice(0, 3), slice(2, 4)):
        total = members.slice(gpus=part).total_of.call(mesh.slice(gpus=part))
        assert set(values(total)) == {float(sum(range(len(range(4)[part]))))}


def test_groups_may_be_created_concurrently_in_any_order(procs: Callable[..., Any]) -> None:
    parts = [slice(first, last, step) for first in range(3) for last in (3, 4) for step in (1, 2, 3)]
    parts = list({tuple(range(4)[part]): part for part in parts if len(range(4)[part]) > 1}.values())
    for seed in range(3):
        mesh = procs(4)
        actors = [mesh.spawn(f"members {index}", Member) for index in range(len(parts))]
        for each in actors:
            values(each.pid.call())
        both = list(zip(actors, parts, strict=True))
        random.Random(seed).shuffle(both)
        calls = [
            (part, each.slice(gpus=part).total_after.call(mesh.slice(gpus=part), f"{seed} {part}"))
            for each, part in both
        ]
        for part, call in calls:
            assert set(values(call)) == {float(sum(range(len(range(4)[part]))))}


@pytest.mark.parametrize("victim", [0, 1])
def test_death_frees_ranks_during_group_creation(procs: Callable[..., Any], victim: int) -> None:
    mesh = procs(3)
    members = mesh.spawn("members", Member)
    pids = values(members.pid.call())
    assert values(members.total.call()) == [3.0] * 3
    waits = members.slice(gpus=1 - victim).total_of.call(mesh.slice(gpus=slice(0, 2)))
    beside = mesh.spawn("beside", Member).slice(gpus=1 - victim)
    assert wait_until(lambda: beside.making.call_one().get(20))
    with supervise(mesh):
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(ActorError):
            waits.get(20)


class AsyncMember(Actor):
    @endpoint
    async def total(self) -> float:
        import torch
        import torch.distributed as dist

        here = torch.tensor([float(current_rank().rank)])
        dist.all_reduce(here, group=group())
        return here.item()


def test_async_actors_use_groups(procs: Callable[..., Any]) -> None:
    assert values(procs(2).spawn("members", AsyncMember).total.call()) == [1.0, 1.0]


@pytest.mark.parametrize("victim", [0, 2])
def test_death_frees_ranks_from_collective(procs: Callable[..., Any], victim: int) -> None:
    members = procs(3).spawn("members", Member)
    pids = values(members.pid.call())
    waiting = members.wait_for_others.call(victim)
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        waiting.get(10)
    alive = members.slice(gpus=slice(0, 2)) if victim == 2 else members.slice(gpus=slice(1, 3))
    # They answer again, so they are not stuck; and they know why there is no group.
    assert len(values(alive.pid.call())) == 2
    with pytest.raises(ActorError, match=f"because rank {victim} died") as caught:
        alive.total.call().get(10)
    assert isinstance(caught.value.exception, GroupError)


def test_death_frees_ranks_from_own_group(procs: Callable[..., Any], tmp_path: Any) -> None:
    members = procs(2, env={"MEETING": str(tmp_path / "meeting")}).spawn("members", Member)
    pids = values(members.pid.call())
    members.own_group.call().get(30)
    # The mesh adopts the group that the program has created.
    assert values(members.total.call()) == [1.0, 1.0]
    waiting = members.wait_for_others.call(1)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(SupervisionError):
        waiting.get(10)
    assert len(values(members.slice(gpus=0).pid.call())) == 1


def test_group_ended_by_program_is_recreated(procs: Callable[..., Any]) -> None:
    members = procs(2).spawn("members", Member)
    assert values(members.total.call()) == [1.0, 1.0]
    members.end_group.call().get(30)
    assert values(members.total.call()) == [1.0, 1.0]


def test_groups_are_recreated_with_new_incarnation(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    members = mesh.spawn("members", Member)
    assert values(members.total.call()) == [3.0] * 3
    for victim in (2, 0):
        pids = values(members.pid.call())
        os.kill(pids[victim], signal.SIGKILL)

        def known() -> bool:
            try:
                members.pid.call().get(10)
            except DeviceMeshError:
                return True
            return False

        assert wait_until(known)
        heal_mesh(mesh)
        assert values(members.total.call()) == [3.0] * 3
        assert values(members.total.call("gpus")) == [3.0] * 3


def test_rank_that_does_not_join_is_named(leaks: Kit) -> None:
    from monarch._tensors.collectives.store import find_store, meet, serve_store

    store, port = serve_store("127.0.0.1", 3)
    other = find_store("127.0.0.1", port, 3)
    other.set("joined/2", "cpu")
    with pytest.raises(GroupError, match=r"ranks \[1\] of 3 did not join the process group within 0.2 s"):
        meet(store, 0, 3, "cpu", seconds=0.2)
    # Torch keeps it for its next store.
    leaks.rebase()


def test_broken_connection_without_death_recreates_groups(procs: Callable[..., Any]) -> None:
    """The pending collective fails, and the next one has new groups."""
    members = procs(3).spawn("members", Member)
    assert values(members.total.call()) == [3.0] * 3
    generation = members.slice(gpus=0).generation.call_one().get(30)
    for rank in (0, 2):
        assert members.slice(gpus=rank).cut.call_one().get(30) > 0
        with pytest.raises(ActorError, match=r"gloo|Connection"):
            members.total.call().get(30)
        # The others are notified, so that all join the same new generation, before the next call begins.
        before = generation
        assert wait_until(
            lambda before=before: len(found := set(values(members.generation.call()))) == 1 and min(found) > before
        )
        (generation,) = set(values(members.generation.call()))
        assert values(members.total.call()) == [3.0] * 3
