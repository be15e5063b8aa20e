"""A rank that waits in a collective for finished ranks is reported on stderr, and nothing is ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import group

pytestmark = pytest.mark.slow


class Trainer(Actor):
    def __init__(self) -> None:
        self.rank = current_rank().rank

    @endpoint
    def meet(self, ranks: list[int], operation: str = "barrier") -> str:
        """Only these ranks take part."""
        import torch
        import torch.distributed as dist

        world = group()
        if self.rank not in ranks:
            return "did not meet"
        if operation == "barrier":
            dist.barrier(world)
        elif operation == "work":
            dist.all_reduce(torch.ones(1), async_op=True).wait()  # pyright: ignore[reportOptionalMemberAccess]
        elif operation == "recv":
            dist.recv(torch.ones(1), 1)
        return "met"

    @endpoint
    def send(self) -> None:
        import torch
        import torch.distributed as dist

        dist.send(torch.ones(1), 0)

    @endpoint
    def meet_late(self, late: int, go: str) -> str:
        """One rank computes while some wait for it, and others have finished."""
        import torch
        import torch.distributed as dist

        world = group()
        if self.rank == late:
            while not Path(go).exists():
                time.sleep(0.01)
        if self.rank == 0:
            dist.gather(torch.ones(1), [torch.ones(1)] * dist.get_world_size(), group=world)
        else:
            dist.gather(torch.ones(1), group=world)
        return "met"


@pytest.fixture
def trainers(procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MONARCH_COLLECTIVE_WAIT_S", "0.4")
    mesh = procs(3).spawn("trainers", Trainer)
    values(mesh.meet.call([0, 1, 2]))
    return mesh


def values(future: Any) -> list[Any]:
    return list(future.get(30).values())


def reported(capfd: pytest.CaptureFixture[str], seen: list[str]) -> str:
    out = capfd.readouterr().err
    seen.append(out)
    return "".join(seen)


@pytest.mark.parametrize("operation", ["barrier", "work"])
def test_endpoint_waiting_for_finished_ranks_is_reported(
    trainers: Any, capfd: pytest.CaptureFixture[str], operation: str
) -> None:
    future = trainers.meet.call([0], operation)
    seen: list[str] = []
    assert wait_until(lambda: "has waited" in reported(capfd, seen))
    name = "barrier(), " if operation == "barrier" else ""
    assert f" s in a collective ({name}#2 of the default group) that ranks 1-2 have not joined: " in "".join(seen)
    assert "they have finished trainers.meet(); end that call, or call it on all ranks of the group" in "".join(seen)
    time.sleep(2.5)  # for further looks, which are to say nothing new before 4 s
    assert reported(capfd, seen).count("has waited") == 1
    # A late call of the others still joins it: nothing was ended.
    assert values(trainers.slice(gpus=slice(1, 3)).meet.call([1, 2], operation)) == ["met"] * 2
    assert values(future) == ["met", "did not meet", "did not meet"]


def test_long_wait_is_reported_once_more_with_its_true_time(trainers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    future = trainers.slice(gpus=0).meet.call_one([0])
    seen: list[str] = []
    assert wait_until(lambda: reported(capfd, seen).count("has waited") == 2)
    first, second = re.findall(r"has waited ([0-9.]+) s", "".join(seen))
    assert float(second) > 9 * float(first)
    assert "ranks 1-2 have not joined: trainers[gpus=0].meet() does not run on them" in "".join(seen)
    assert values(trainers.slice(gpus=slice(1, 3)).meet.call([1, 2])) == ["met"] * 2
    assert future.get(30) == "met"


def test_receive_from_finished_rank_is_reported(trainers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    future = trainers.meet.call([0], "recv")
    seen: list[str] = []
    assert wait_until(lambda: "rank 1 has not joined: it has finished" in reported(capfd, seen))
    trainers.slice(gpus=1).send.call_one().get(30)
    assert values(future)[0] == "met"


def test_ranks_waiting_for_slow_one_are_not_reported(
    trainers: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    future = trainers.meet_late.call(2, str(go))
    assert wait_until(lambda: [peer.proc for peer in future.waits_for()] == [future.targets[n].proc for n in (0, 2)])
    time.sleep(2.5)  # for several looks
    go.touch()
    assert values(future) == ["met"] * 3
    assert "has waited" not in capfd.readouterr().err
