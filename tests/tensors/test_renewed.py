"""Groups that code keeps after a failure, and modules that communicate through them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import Actor, current_rank, endpoint
from monarch.exceptions import ActorError

SIZE = 2


class Trainer(Actor):
    """Has the same module in DDP, in shards, and a group and a DeviceMesh of its own."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        self.rank = current_rank().rank
        # Several buckets, so that a backward pass can be broken off between two.
        layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        # Libraries have subclasses of it.
        parallel: Any = type("Own", (type("Base", (DistributedDataParallel,), {}),), {})
        self.ddp = parallel(layers, bucket_cap_mb=0.01)
        self.shards = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        for each in (*self.shards, self.shards):
            fully_shard(each)
        self.optimizers = [torch.optim.AdamW(each.parameters()) for each in (self.ddp, self.shards)]
        self.own: Any = dist.new_group(list(range(SIZE)), timeout=datetime.timedelta(seconds=77))
        self.grid = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("rows", "columns"))
        self.world = dist.group.WORLD

    def step(self, module: Any, optimizer: Any, fails: str = "") -> None:
        """Make a training step; the last rank may fail after the ``forward`` pass or within the ``backward`` pass."""
        import torch

        def fail(*_: Any) -> None:
            raise ValueError("here")

        optimizer.zero_grad()
        width = next(iter(module.parameters())).shape[1]
        hooks: list[Any] = []
        if fails == "backward" and self.rank == SIZE - 1:
            middle = getattr(module, "module", module)[1]
            hooks.append(middle.register_forward_hook(lambda *args: args[-1].register_hook(fail) and None))
        result = module(torch.full((2, width), 1.0 + self.rank))
        for hook in hooks:
            hook.remove()
        if fails == "forward" and self.rank == SIZE - 1:
            fail()
        result.sum().backward()
        optimizer.step()

    @endpoint
    def steps(self, count: int, which: int = 0, fails: str = "") -> float:
        """Train; a failure is in the last step."""
        module = (self.ddp, self.shards)[which]
        for index in range(count):
            self.step(module, self.optimizers[which], fails if index == count - 1 else "")
        first: Any = next(iter(module.parameters())).detach()
        return float((first.full_tensor() if hasattr(first, "full_tensor") else first).double().sum())

    @endpoint
    def drift(self) -> None:
        """Make the parameters of the ranks differ, as an interrupt within an optimizer step does."""
        import torch

        with torch.no_grad():
            for each in self.ddp.parameters():
                each += self.rank

    @endpoint
    def fail(self) -> None:
        """Fail on the last rank, for which the others wait."""
        import torch.distributed as dist

        if self.rank == SIZE - 1:
            raise ValueError("here")
        dist.barrier()

    @endpoint
    def uses(self) -> list[Any]:
        """Use each group that was kept."""
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import Shard, distribute_tensor

        sums: list[Any] = []
        # A DeviceMesh keeps the names of its groups only; those of its columns have fewer ranks than the mesh.
        for group in (self.world, None, self.own, self.grid.get_group("rows"), self.grid.get_group("columns")):
            here = torch.ones(1)
            dist.all_reduce(here, group=group)
            sums.append(here.item())
        sharded: Any = distribute_tensor(torch.ones(4), self.grid["rows"], [Shard(0)])
        sums.append(float(sharded.sum().full_tensor()))
        sums.append(dist.get_rank(self.own) == self.rank and dist.group.WORLD is self.world)
        return sums

    @endpoint
    def names(self) -> tuple[str, float]:
        """Of a new group, and the timeout of the kept one."""
        import torch
        import torch.distributed as dist

        from monarch._tensors.torch_compat import timeout_of

        group: Any = dist.new_group(list(range(SIZE)))
        dist.all_reduce(torch.ones(1), group=group)
        return str(group.group_name), timeout_of(self.own)

    @endpoint
    def meet(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    @endpoint
    def break_renewal(self, after: int) -> None:
        """Let the next renewal of groups fail on all ranks, as by a death, after some of them."""
        import torch.distributed as dist

        from monarch._tensors.collectives import world as worlds

        cls: Any = worlds.World
        make, left = cls._make_subgroup, [after]

        def fails(world: Any, *args: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                return make(world, *args)
            cls._make_subgroup = make
            # As a death would, this must free both.
            dist.barrier()
            raise RuntimeError("connection closed by peer")

        cls._make_subgroup = fails


@pytest.fixture
def trainers(procs: Callable[..., Any]) -> Any:
    return procs(SIZE).spawn("trainers", Trainer)


def values(future: Any) -> list[Any]:
    return list(future.get(60).values())


@pytest.mark.parametrize("times", [1, 3])
def test_kept_groups_work_on_after_a_failure(trainers: Any, times: int) -> None:
    expected = [[float(SIZE)] * 4 + [1.0, 4.0, True]] * SIZE
    assert values(trainers.uses.call()) == expected
    before = values(trainers.names.call())
    for _ in range(times):
        with pytest.raises(ActorError, match="here"):
            trainers.fail.call().get(60)
        assert values(trainers.uses.call()) == expected
    after = values(trainers.names.call())
    # A name that all ranks use, and nobody else.
    assert len(set(after)) == 1 and set(after).isdisjoint(before)
    assert [seconds for _, seconds in after] == [77] * SIZE


@pytest.mark.parametrize("after", [0, 1])
def test_kept_groups_work_on_after_a_failed_renewal(trainers: Any, after: int) -> None:
    expected = [[float(SIZE)] * 4 + [1.0, 4.0, True]] * SIZE
    assert values(trainers.uses.call()) == expected
    values(trainers.break_renewal.call(after))
    with pytest.raises(ActorError, match="here"):
        trainers.fail.call().get(60)
    with contextlib.suppress(ActorError):
        # Of the renewal, if it has not failed before this call begins.
        trainers.meet.call().get(20)
    trainers.meet.call().get(20)
    assert values(trainers.uses.call()) == expected


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("which", [0, 1], ids=["ddp", "fully_shard"])
def test_training_goes_on_after_a_step_that_was_broken_off(trainers: Any, which: int, fails: str) -> None:
    one, other = values(trainers.steps.call(3, which))
    assert one == other
    for _ in range(2):
        with pytest.raises(ActorError, match="here"):
            trainers.steps.call(2, which, fails).get(60)
        one, other = values(trainers.steps.call(3, which))
        assert one == other


def test_replicas_are_equal_again_after_a_failure(trainers: Any) -> None:
    trainers.drift.call().get(60)
    one, other = values(trainers.steps.call(1))
    assert one != other
    with pytest.raises(ActorError, match="here"):
        trainers.fail.call().get(60)
    one, other = values(trainers.steps.call(1))
    assert one == other
