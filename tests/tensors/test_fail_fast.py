"""Fail fast: a rank that raises frees the ranks of the call that wait for it in a collective, and no others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import group
from monarch.exceptions import ActorError


class Trainer(Actor):
    @endpoint
    def total(self) -> float:
        import torch
        import torch.distributed as dist

        here = torch.ones(1)
        dist.all_reduce(here, group=group())
        return here.item()

    @endpoint
    def step(self, failing: int, busy: str = "") -> float:
        """A step in which one rank raises; one that is busy comes to the collective later."""
        rank = current_rank().rank
        if rank == failing:
            raise ValueError("bad sample 17")
        if busy and rank == 0:
            while not os.path.exists(busy):
                time.sleep(0.001)
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1), group=group())
        return 1.0

    @endpoint
    def alone(self, failing: int, go: str) -> int:
        """One rank raises; the others wait for nobody."""
        if current_rank().rank == failing:
            raise ValueError("bad sample 17")
        while not os.path.exists(go):
            time.sleep(0.001)
        return current_rank().rank

    @endpoint
    def receive(self, failing: int) -> None:
        import torch
        import torch.distributed as dist

        group()
        if current_rank().rank == failing:
            raise ValueError("bad sample 17")
        dist.recv(torch.ones(1), failing)

    @endpoint
    def receive_any(self, failing: int) -> None:
        import torch
        import torch.distributed as dist

        group()
        if current_rank().rank == failing:
            raise ValueError("bad sample 17")
        dist.recv(torch.ones(1))

    @endpoint
    def meet(self, failing: int) -> None:
        import torch.distributed as dist

        group()
        if current_rank().rank == failing:
            raise ValueError("bad sample 17")
        dist.new_group([0, 1])

    @endpoint
    def own_group(self, failing: int) -> None:
        import torch
        import torch.distributed as dist

        group()
        pair = dist.new_group([0, 1])
        if current_rank().rank == failing:
            raise ValueError("bad sample 17")
        dist.all_reduce(torch.ones(1), group=pair)

    @endpoint
    def insists(self, failing: int) -> str:
        """Code that catches the error of a collective, and continues."""
        import torch
        import torch.distributed as dist

        if current_rank().rank == failing:
            raise ValueError("bad sample 17")
        try:
            dist.all_reduce(torch.ones(1), group=group())
        except RuntimeError:
            return "went on"
        return "not freed"


def values(future: Any) -> list[Any]:
    return list(future.get(60).values())


def raised(future: Any) -> ActorError:
    with pytest.raises(ActorError, match="bad sample 17") as caught:
        future.get(30)
    assert isinstance(caught.value.exception, ValueError)
    return caught.value


@pytest.mark.parametrize("count", [2, 3, 8])
def test_error_of_rank_frees_those_that_wait_for_it(procs: Callable[..., Any], count: int) -> None:
    trainers = procs(count).spawn("trainers", Trainer)
    for failing in (1, 0):
        error = raised(trainers.step.call(failing))
        assert error.rank == failing
        others = set(range(count)) - {failing}
        assert error.failures.keys() == set(range(count))
        for rank in others:
            assert f"rank {failing} failed before joining it" in error.failures[rank]
            assert "gloo" not in error.failures[rank]
        # The groups are created again.
        assert values(trainers.total.call()) == [float(count)] * count


def test_error_frees_rank_that_joins_collective_later(procs: Callable[..., Any], tmp_path: Path) -> None:
    trainers = procs(3).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [3.0] * 3
    go = tmp_path / "go"
    future = trainers.step.call(1, str(go))
    # The waiting rank was freed; the working one is not disturbed.
    assert wait_until(lambda: [peer.proc for peer in future.waits_for()] == [future.targets[0].proc])
    go.touch()
    assert raised(future).rank == 1
    assert values(trainers.total.call()) == [3.0] * 3


def test_ranks_that_wait_for_nobody_finish(procs: Callable[..., Any], tmp_path: Path) -> None:
    trainers = procs(3).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [3.0] * 3
    go = tmp_path / "go"
    future = trainers.alone.call(1, str(go))
    assert wait_until(lambda: future.party is not None)
    time.sleep(0.5)  # for several looks, which are to change nothing
    assert not future.done
    go.touch()
    error = raised(future)
    assert error.results is not None and list(error.results.values()) == [0, None, 2]
    # Nor are the groups: existing ones stay usable.
    assert values(trainers.total.call()) == [3.0] * 3


@pytest.mark.parametrize("wait", ["receive", "receive_any", "meet", "own_group"])
def test_error_frees_those_that_receive_or_make_group(procs: Callable[..., Any], wait: str) -> None:
    trainers = procs(2).spawn("trainers", Trainer)
    assert raised(getattr(trainers, wait).call(1)).rank == 1
    assert values(trainers.total.call()) == [2.0] * 2


def test_code_catching_broken_collective_continues(procs: Callable[..., Any]) -> None:
    trainers = procs(2).spawn("trainers", Trainer)
    error = raised(trainers.insists.call(1))
    assert error.results is not None and list(error.results.values()) == ["went on", None]
    assert values(trainers.total.call()) == [2.0] * 2


def test_ranks_are_not_queried_without_failures(procs: Callable[..., Any]) -> None:
    from monarch._node.current import current_node

    trainers = procs(2).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [2.0] * 2
    node = current_node()
    before = node.ports.last
    future = trainers.total.call()
    future.get(30)
    assert future.party is None and node.ports.last == before + 1
    # A call of one rank has no others.
    with pytest.raises(ActorError):
        trainers.slice(gpus=1).alone.call_one(0, "").get(30)
    assert node.ports.last == before + 2
