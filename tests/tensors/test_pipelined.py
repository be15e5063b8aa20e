"""Calls sent before a failure was known join no collectives of the failed call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import group
from monarch.exceptions import ActorError


class Trainer(Actor):
    def __init__(self) -> None:
        self.rank = current_rank().rank

    @endpoint
    def step(self, number: float, failing: int = -1) -> float:
        import torch
        import torch.distributed as dist

        if self.rank == failing:
            raise ValueError("bad sample 17")
        here = torch.tensor([number])
        dist.all_reduce(here, group=group())
        return here.item()

    @endpoint
    def wait_at_most(self, rounds: float, bound: str) -> None:
        """For older calls, after a failure."""
        from monarch._groups import pipelined

        pipelined._ANSWER = rounds
        os.environ["MONARCH_FAILED_CALL_WAIT_S"] = bound

    @endpoint
    def diverge(self, go: str) -> None:
        """Rank 1 raises; rank 0 waits for nobody and continues."""
        if self.rank == 1:
            raise ValueError("bad sample 17")
        if self.rank == 0:
            assert wait_until(lambda: Path(go).exists())

    @endpoint
    def within(self, some: Any) -> float:
        import torch
        import torch.distributed as dist

        here = torch.ones(1)
        dist.all_reduce(here, group=some)
        return here.item()


def values(future: Any) -> list[Any]:
    return list(future.get(30).values())


@pytest.mark.parametrize("failing", [0, 1])
def test_queued_calls_after_failure_give_right_numbers(procs: Callable[..., Any], failing: int) -> None:
    trainers = procs(3).spawn("trainers", Trainer)
    assert values(trainers.step.call(1)) == [3.0] * 3
    failed = trainers.step.call(10, failing)
    queued = [(number, trainers.step.call(number)) for number in (20, 30, 40, 50)]
    with pytest.raises(ActorError, match="bad sample 17") as caught:
        failed.get(30)
    assert caught.value.failures.keys() == {0, 1, 2}
    for number, future in queued:
        assert values(future) == [3.0 * number] * 3
    assert values(trainers.step.call(1)) == [3.0] * 3


@pytest.mark.slow
def test_calls_sent_just_after_a_failure_give_right_numbers(procs: Callable[..., Any]) -> None:
    """The program knows of the failure, but the ranks that wait for the failed one are not freed yet."""
    from monarch._groups.pipelined import Failures
    from monarch._node.current import current_node

    trainers = procs(3).spawn("trainers", Trainer)
    heard = current_node().part(Failures).heard
    assert values(trainers.step.call(1)) == [3.0] * 3
    for _ in range(20):
        failed = trainers.step.call(10, 1)
        while failed.port not in heard:
            pass
        queued = [(number, trainers.step.call(number)) for number in (20, 30)]
        with pytest.raises(ActorError, match="bad sample 17") as caught:
            failed.get(30)
        assert caught.value.failures.keys() == {0, 1, 2}
        for number, future in queued:
            assert values(future) == [3.0 * number] * 3


def test_call_sent_after_failure_waits_for_no_slow_rank(procs: Callable[..., Any], tmp_path: Path) -> None:
    mesh = procs(3)
    trainers = mesh.spawn("trainers", Trainer)
    assert values(trainers.step.call(1)) == [3.0] * 3
    failed = trainers.diverge.call(str(tmp_path / "go"))
    assert wait_until(lambda: failed.failed_positions() == [1])
    some = mesh.slice(gpus=slice(1, 3))
    assert values(trainers.slice(gpus=slice(1, 3)).within.call(some.group())) == [2.0] * 2
    assert not failed.done
    (tmp_path / "go").touch()
    with pytest.raises(ActorError, match="bad sample 17"):
        failed.get(30)


def test_queued_calls_after_calls_to_slices_give_right_numbers(procs: Callable[..., Any]) -> None:
    trainers = procs(3).spawn("trainers", Trainer)
    assert values(trainers.step.call(1)) == [3.0] * 3
    failed = [trainers.slice(gpus=rank).step.call(10, 1) for rank in range(3)]
    queued = [(number, trainers.step.call(number)) for number in (20, 30, 40)]
    for future in failed:
        with pytest.raises(ActorError):
            future.get(30)
    for number, future in queued:
        assert values(future) == [3.0 * number] * 3
    assert values(trainers.step.call(1)) == [3.0] * 3


def test_queued_calls_wait_when_the_program_is_silent(procs: Callable[..., Any]) -> None:
    trainers = procs(3).spawn("trainers", Trainer)
    assert values(trainers.step.call(1)) == [3.0] * 3
    values(trainers.wait_at_most.call(0.3, "60"))
    failed = trainers.step.call(10, 1)
    queued = [(number, trainers.step.call(number)) for number in (20, 30, 40)]
    ctypes.PyDLL(None).sleep(3)  # with the GIL held, so that no thread of this process answers
    with pytest.raises(ActorError, match="bad sample 17"):
        failed.get(30)
    for number, future in queued:
        assert values(future) == [3.0 * number] * 3


def test_queued_call_raises_when_the_program_is_silent_too_long(procs: Callable[..., Any]) -> None:
    trainers = procs(3).spawn("trainers", Trainer)
    assert values(trainers.step.call(1)) == [3.0] * 3
    values(trainers.wait_at_most.call(0.3, "1"))
    failed, queued = trainers.step.call(10, 1), trainers.step.call(20)
    ctypes.PyDLL(None).sleep(3)  # likewise
    with pytest.raises(ActorError, match="bad sample 17"):
        failed.get(30)
    with pytest.raises(ActorError) as caught:
        queued.get(30)
    assert "GroupError" in str(caught.value.failures[1])
    assert "the process that sent it, to answer" in str(caught.value.failures[1])
    assert values(trainers.step.call(1)) == [3.0] * 3
