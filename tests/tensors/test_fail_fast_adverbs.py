"""Fail fast beyond ``call``: streams, ports, broadcasts, slices, relayed calls, constructors, programs of torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._groups.breaking import doom
from monarch._meshes.actors.ask import ask
from monarch._node.remote_errors import unpack_failure
from monarch.actor import Actor, Channel, current_rank, endpoint, send
from monarch.distributed import group
from monarch.exceptions import ActorError, GroupError
from monarch.spmd import SPMDActor

FREED = "rank 1 failed before joining it"


def reduce() -> float:
    import torch
    import torch.distributed as dist

    here = torch.ones(1)
    dist.all_reduce(here, group=group())
    return here.item()


class Trainer(Actor):
    def __init__(self) -> None:
        # In a call to a slice, the rank counts in the slice.
        self.rank = current_rank().rank

    @endpoint
    def total(self) -> float:
        return reduce()

    @endpoint
    def step(self) -> float:
        """A step in which rank 1 raises, and the others wait for it."""
        if self.rank == 1:
            raise ValueError("bad sample 17")
        return reduce()


class Front(Actor):
    """Has other actors work."""

    @endpoint
    def relay(self, trainers: Any) -> str:
        try:
            trainers.step.call().get(20)
        except ActorError as error:
            return str(error)
        return "no error"


class Outer(Actor):
    """Each rank has the trainer of its own process work."""

    @endpoint
    def step(self, trainers: Any) -> float:
        rank = current_rank().rank
        if rank == 1:
            raise ValueError("bad sample 17")
        return trainers.slice(gpus=rank).total.call_one().get(20)


class Builder(Actor):
    """The constructor of rank 1 raises while the others wait for it."""

    def __init__(self) -> None:
        if current_rank().rank == 1:
            raise ValueError("bad sample 17")
        reduce()


def errors(futures: Any) -> list[str]:
    texts: list[str] = []
    for future in futures:
        with pytest.raises((ActorError, ValueError, GroupError)) as caught:
            future.get(20)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    return texts


def works(trainers: Any) -> None:
    count = len(trainers)
    assert list(trainers.total.call().get(30).values()) == [float(count)] * count


def told(texts: list[str]) -> None:
    assert sum("ValueError: bad sample 17" in text for text in texts) == 1
    assert sum(FREED in text for text in texts) == len(texts) - 1


@pytest.fixture
def trainers(procs: Callable[..., Any]) -> Any:
    mesh = procs(3).spawn("trainers", Trainer)
    works(mesh)
    return mesh


def test_stream_frees_those_that_wait(trainers: Any) -> None:
    told(errors(trainers.step.stream()))
    works(trainers)


def test_calls_of_single_actors_free_each_other(trainers: Any) -> None:
    told(errors([trainers.slice(gpus=rank).step.call_one() for rank in range(3)]))
    works(trainers)


def test_rank_that_failed_in_another_actor_is_named(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    trainers, others = mesh.spawn("trainers", Trainer), mesh.spawn("others", Trainer)
    works(trainers)
    works(others)
    for text in errors([trainers.step.call(), others.total.call()]):
        assert f"because {FREED}" in text and "because ranks" not in text
    works(others)


def test_calls_sent_after_failure_are_freed(trainers: Any) -> None:
    first = trainers.slice(gpus=1).step.call_one()
    assert wait_until(lambda: first.done)
    time.sleep(0.3)  # long after the first look
    told(errors([trainers.slice(gpus=rank).step.call_one() for rank in (0, 2)] + [first]))
    works(trainers)


def test_answers_to_port_free_those_that_wait(trainers: Any) -> None:
    port, receiver = Channel[float].open()
    send(trainers.step, port=port)
    told(errors(receiver.recv() for _ in range(3)))
    receiver.close()
    works(trainers)


def test_broadcast_frees_those_that_wait(trainers: Any, monkeypatch: Any) -> None:
    from monarch import actor

    failures: list[Any] = []
    monkeypatch.setattr(actor, "unhandled_fault_hook", failures.append)
    trainers.step.broadcast()
    assert wait_until(lambda: {rank for each in failures for rank in each.ranks} == {0, 1, 2}), failures
    texts = [str(each) for each in failures]
    assert len(texts) == 2 and "bad sample 17" in texts[0] and FREED in texts[1]


def test_relayed_call_frees_those_that_wait(trainers: Any, procs: Callable[..., Any]) -> None:
    front = procs(1).spawn("front", Front)
    text = front.relay.call_one(trainers).get(30)
    assert "bad sample 17" in text and FREED in text
    works(trainers)


def test_error_frees_transitive_waits(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    trainers, outer = mesh.spawn("trainers", Trainer), mesh.spawn("outer", Outer)
    works(trainers)
    (text,) = errors([outer.step.call(trainers)])
    assert "bad sample 17" in text and FREED in text
    works(trainers)


def freed(built: Any) -> None:
    creation = built._state.creation
    # Ranks that reach the collective after the failure was reported end too, with the reason.
    assert wait_until(lambda: not creation.unanswered)
    assert all("the collective cannot complete" in unpack_failure(creation.raised[rank].body).text for rank in (0, 2))


def test_constructors_waiting_for_failed_one_are_freed(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    trainers = mesh.spawn("trainers", Trainer)
    for _ in range(3):
        # An existing group, from the second time on: ranks that did not wait in it learn that it is broken.
        built = mesh.spawn("built", Builder)
        with pytest.raises(ActorError, match="bad sample 17"):
            built.initialized.get(20)
        works(trainers)
        freed(built)


def test_ranks_without_that_constructor_keep_their_groups(trainers: Any) -> None:
    # A rank may be told of the failure when it already makes the groups of a later call.
    told = ask(trainers, doom, "built-1", "elsewhere", 7, "the constructor of built failed on rank 1", [1])
    assert told.get(20) == {0: 0, 1: 0, 2: 0}
    works(trainers)


class LateBuilder(Actor):
    """The constructors of the others come to the collective long after that of rank 1 has raised."""

    def __init__(self, go: str) -> None:
        if current_rank().rank == 1:
            raise ValueError("bad sample 17")
        assert wait_until(lambda: Path(go).exists())
        reduce()


@pytest.mark.parametrize("made", [False, True])
def test_late_constructors_do_not_join_later_call(procs: Callable[..., Any], tmp_path: Path, made: bool) -> None:
    mesh = procs(3)
    trainers = mesh.spawn("trainers", Trainer)
    if made:
        works(trainers)
    late = mesh.spawn("late", LateBuilder, str(tmp_path / "go"))
    with pytest.raises(ActorError, match="bad sample 17"):
        late.initialized.get(20)
    # Not all ranks take part, so rank 1 would meet the constructors of the others.
    single = trainers.slice(gpus=1).total.call_one()
    (tmp_path / "go").touch()
    freed(late)
    others = [trainers.slice(gpus=rank).total.call_one() for rank in (0, 2)]
    assert [each.get(30) for each in (single, *others)] == [3.0] * 3
    works(trainers)


SCRIPT = """
import os, torch, torch.distributed as dist
{before}
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
{after}
dist.barrier()
dist.destroy_process_group()
"""
FAILS = 'if os.environ["RANK"] == "1": raise ValueError("bad sample 17")'


@pytest.mark.parametrize("where", ["before", "after"])
def test_torchrun_program_ends_when_rank_raises(procs: Callable[..., Any], tmp_path: Path, where: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**{"before": "", "after": "", where: FAILS}))
    actors = procs(3).spawn("program", SPMDActor)
    host, port = actors.slice(gpus=0).get_host_port.call_one().get(30)
    with pytest.raises(ActorError, match="bad sample 17"):
        actors.main.call(host, port, [str(script)]).get(20)
