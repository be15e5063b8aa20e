"""Calls end when their groups are aborted under them, as those of NCCL are, whose collectives do not raise.

The abort itself needs GPUs: see tests/gpu. Here the groups are of gloo, and a rank takes them for groups of NCCL.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, current_rank, endpoint
from monarch.exceptions import ActorError, MonarchError


class Member(Actor):
    def __init__(self) -> None:
        self.goes_on = False
        self.begun = False

    @endpoint
    def take_for_nccl(self) -> None:
        from monarch._tensors.collectives import world as worlds

        setattr(worlds.World, "uses_nccl", lambda self: True)  # noqa: B010

    @endpoint
    def step(self, uses: bool = True) -> None:
        """A collective, a long computation, and an optimizer that must not see what the abort has left."""
        import torch
        import torch.distributed as dist

        self.goes_on = self.begun = False
        if uses:
            dist.all_reduce(torch.ones(1))
        self.begun = True
        end = time.monotonic() + (60 if uses else 2)
        while time.monotonic() < end:
            pass
        self.goes_on = True

    @endpoint
    def keep_group(self) -> None:
        """As DDP does in its constructor."""
        import torch.distributed as dist

        self.group: Any = dist.group.WORLD

    @endpoint
    def reduce(self, fails: bool = False) -> float:
        import torch

        if fails and current_rank().rank == 1:
            raise ValueError("here")
        value = torch.ones(1)
        self.group.allreduce([value]).wait()
        return value.item()

    @endpoint
    def compute(self, uses: bool = True) -> None:
        """A collective in the kept group, as in DDP's backward pass: torch's default group is not read."""
        import torch

        self.goes_on = self.begun = False
        if uses:
            self.group.allreduce([torch.ones(1)]).wait()
        self.begun = True
        end = time.monotonic() + (60 if uses else 2)
        while time.monotonic() < end:
            pass
        self.goes_on = True

    @endpoint
    def went_on(self) -> bool:
        return self.goes_on

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Looker(Actor):
    """In the same processes, to see what the other actor does."""

    @endpoint
    def has_begun(self) -> bool:
        import gc

        return any(each.begun for each in gc.get_objects() if type(each) is Member)


def values(future: Any) -> list[Any]:
    return list(future.get(60).values())


@pytest.mark.parametrize("uses", [True, False], ids=["in groups", "without groups"])
def test_a_death_ends_the_calls_that_use_the_groups(procs: Callable[..., Any], uses: bool) -> None:
    mesh = procs(2)
    members, lookers = mesh.spawn("members", Member), mesh.spawn("lookers", Looker)
    values(members.take_for_nccl.call())
    pids = values(members.pid.call())
    first = members.slice(gpus=0)
    values(members.slice(gpus=slice(0, 2)).pid.call())
    future = first.step.call_one(uses)
    if uses:
        members.slice(gpus=1).step.broadcast()
    assert wait_until(lambda: lookers.slice(gpus=0).has_begun.call_one().get(30))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(MonarchError, match="rank 1"):
        future.get(60)
    assert first.went_on.call_one().get(60) is not uses


@pytest.mark.parametrize("uses", [True, False], ids=["in the group", "not in the group"])
def test_a_death_ends_calls_that_use_a_group_of_an_earlier_call(procs: Callable[..., Any], uses: bool) -> None:
    mesh = procs(2)
    members, lookers = mesh.spawn("members", Member), mesh.spawn("lookers", Looker)
    values(members.take_for_nccl.call())
    pids = values(members.pid.call())
    values(members.keep_group.call())
    first = members.slice(gpus=0)
    future = first.compute.call_one(uses)
    if uses:
        members.slice(gpus=1).compute.broadcast()
    assert wait_until(lambda: lookers.slice(gpus=0).has_begun.call_one().get(30))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(MonarchError, match="rank 1"):
        future.get(50)
    assert first.went_on.call_one().get(60) is not uses


def test_the_call_after_a_failure_is_not_ended(procs: Callable[..., Any]) -> None:
    """It ends the groups of the failed call, before it has begun a collective itself."""
    members = procs(2).spawn("members", Member)
    values(members.take_for_nccl.call())
    values(members.keep_group.call())
    for _ in range(3):
        assert values(members.reduce.call()) == [2.0, 2.0]
        with pytest.raises(ActorError, match="here"):
            members.reduce.call(True).get(60)
    assert values(members.reduce.call()) == [2.0, 2.0]
