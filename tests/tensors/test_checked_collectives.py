"""Checked collectives: ranks with mismatching collectives get an error with the mismatch, and nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import group
from monarch.exceptions import ActorError, CollectiveMismatchError

CHECKED = {"MONARCH_CHECK_COLLECTIVES": "1"}


def reduce() -> float:
    import torch
    import torch.distributed as dist

    here = torch.ones(1)
    dist.all_reduce(here, group=group())
    return here.item()


class Trainer(Actor):
    def __init__(self) -> None:
        self.rank = current_rank().rank

    @endpoint
    def late(self) -> float:
        return reduce()

    @endpoint
    def total(self, odd: str = "") -> float:
        """Rank 1 does something else."""
        import torch
        import torch.distributed as dist

        other = odd and self.rank == 1
        here = torch.ones(5 if other and odd == "shape" else 4, 2)
        if other and odd == "dtype":
            here = here.double()
        if other and odd == "operation":
            dist.barrier(group())
        else:
            dist.all_reduce(here, group=group())
        return here[0, 0].item()

    @endpoint
    def after_a_message(self) -> float:
        import torch
        import torch.distributed as dist

        if self.rank < 2:
            group()
            (dist.send if self.rank == 0 else dist.recv)(torch.ones(1), 1 - self.rank)
        return reduce()

    @endpoint
    def along(self, mesh: Any, odd: bool) -> float:
        import torch
        import torch.distributed as dist

        here = torch.ones(3 if odd and self.rank == 1 else 2)
        dist.all_reduce(here, group=mesh.group("gpus"))
        return here[0].item()

    @endpoint
    def step(self) -> None:
        if self.rank == 1:
            raise ValueError("bad sample 17")
        reduce()

    @endpoint
    def alone(self) -> float:
        return reduce() if self.rank == 0 else 0.0


def values(future: Any) -> list[Any]:
    return list(future.get(30).values())


def mismatch(future: Any) -> str:
    with pytest.raises(ActorError) as caught:
        future.get(30)
    assert isinstance(caught.value.exception, CollectiveMismatchError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("odd", "texts"),
    [
        ("shape", ["rank 0 called allreduce of shape (4, 2)", "rank 1 called allreduce of shape (5, 2)", "one shape"]),
        ("dtype", ["shape (4, 2) and dtype float32", "shape (4, 2) and dtype float64", "one shape and dtype"]),
        ("operation", ["rank 0 called", "rank 1 called", "barrier", "call the same one on all of them"]),
    ],
)
def test_mismatch_names_ranks_shapes_and_dtypes(procs: Callable[..., Any], odd: str, texts: list[str]) -> None:
    trainers = procs(3, env=CHECKED).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [3.0] * 3
    said = mismatch(trainers.total.call(odd))
    assert all(text in said for text in texts), said
    assert "FingerPrint" not in said.partition("Remote traceback")[0]
    assert values(trainers.total.call()) == [3.0] * 3


def test_check_says_that_it_counts_messages(procs: Callable[..., Any]) -> None:
    said = mismatch(procs(3, env=CHECKED).spawn("trainers", Trainer).after_a_message.call())
    assert "called allreduce of shape (1) and dtype float32 after different numbers of operations (rank 0: 1," in said
    assert "send or recv, which torch's check counts as well" in said and "give all of them" not in said


def test_groups_along_axis_are_checked(procs: Callable[..., Any]) -> None:
    mesh = procs({"hosts": 2, "gpus": 2}, env=CHECKED)
    trainers = mesh.spawn("trainers", Trainer)
    assert values(trainers.along.call(mesh, False)) == [2.0] * 4
    assert "rank 1 called allreduce of shape (3)" in mismatch(trainers.along.call(mesh, True))


def test_rank_that_raises_frees_ranks_that_check(procs: Callable[..., Any]) -> None:
    trainers = procs(3, env=CHECKED).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [3.0] * 3
    with pytest.raises(ActorError, match="bad sample 17") as caught:
        trainers.step.call().get(30)
    for rank in (0, 2):
        assert "rank 1 failed before joining it" in caught.value.failures[rank]
    assert values(trainers.total.call()) == [3.0] * 3


def test_checked_wait_for_finished_ranks_is_reported(
    procs: Callable[..., Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_COLLECTIVE_WAIT_S", "0.4")
    trainers = procs(2, env=CHECKED).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [2.0] * 2
    future = trainers.alone.call()
    seen: list[str] = []

    def shown() -> str:
        seen.append(capfd.readouterr().err)
        return "".join(seen)

    assert wait_until(lambda: "(all_reduce(), #2 of the default group) that rank 1 has not joined" in shown())
    trainers.slice(gpus=1).late.call_one().get(30)
    assert values(future) == [2.0, 0.0]


def test_nothing_is_checked_unless_asked_for(procs: Callable[..., Any]) -> None:
    class Level(Actor):
        @endpoint
        def level(self) -> str:
            from torch._C._distributed_c10d import get_debug_level

            group()
            return get_debug_level().name

    assert "MONARCH_CHECK_COLLECTIVES" not in os.environ
    assert values(procs(2).spawn("levels", Level).level.call()) == ["OFF"] * 2
    assert values(procs(2, env=CHECKED).spawn("levels", Level).level.call()) == ["DETAIL"] * 2
