"""Generations of process groups: a request about one generation has no effect on the next one."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError

REASON = "a test has cut it off"


class Member(Actor):
    """One rank that takes the steps of several itself, in the order that a test wants."""

    def __init__(self) -> None:
        from monarch._groups.convening import ensure_world
        from monarch._groups.rendezvous import local_rendezvous

        self.own = local_rendezvous()
        self.ensure = ensure_world

    @endpoint
    def exhaust_descriptors(self) -> None:
        """Leave no file descriptors for the next generation."""
        self.own.spoil(REASON)
        # Otherwise gloo closes the cut connections a moment later, and there are descriptors again.
        self.own.leave()
        self.limits, self.held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, self.limits[1]))
        with suppress(OSError):
            while True:
                self.held.append(os.open(os.devnull, os.O_RDONLY))

    @endpoint
    def imported(self) -> None:
        import torch.distributed  # noqa: F401

    @endpoint
    def forbid_descriptors(self) -> None:
        """Allow fewer file descriptors than are open."""
        self.limits, self.held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, self.limits[1]))

    @endpoint
    def free_descriptors(self) -> None:
        for each in self.held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)

    @endpoint
    def total(self) -> float:
        import torch
        import torch.distributed as dist

        here = torch.ones(1)
        dist.all_reduce(here)
        return here.item()

    @endpoint
    def use_while_the_old_world_is_left(self) -> tuple[bool, bool]:
        """Return whether a use of ``dist`` waits until the old groups were left, and then has the new ones."""
        import torch.distributed as dist

        from monarch._tensors.collectives import world as worlds
        from monarch._tensors.torch_compat import backend_of, default_group

        self.ensure()
        self.own.spoil(REASON)
        old, leave = backend_of(default_group(), "cpu"), worlds.leave
        begun, go, done = threading.Event(), threading.Event(), threading.Event()

        def slowly(*args: Any) -> None:
            begun.set()
            go.wait(20)
            leave(*args)

        def use() -> None:
            dist.barrier()
            done.set()

        worlds.leave = slowly
        try:
            threads = [threading.Thread(target=self.ensure), threading.Thread(target=use)]
            threads[0].start()
            begun.wait(20)
            threads[1].start()
            assert wait_until(lambda: done.is_set() or len(self.own._waiting) == 2)
            waited = not done.is_set()
        finally:
            go.set()
            worlds.leave = leave
        for thread in threads:
            thread.join(20)
        return waited, backend_of(dist.group.WORLD, "cpu") is not old

    @endpoint
    def use_while_the_world_is_replaced(self) -> float:
        """Use ``dist`` when this rank leaves the new group just before its code reads it, as for the next one."""
        import torch
        import torch.distributed as dist

        from monarch._groups import default_group

        ensure, left = default_group.ensure_world, list[bool]()

        def then_leave() -> Any:
            world = ensure()
            if not left:
                left.append(True)
                self.own._leave_formed()
            return world

        default_group.ensure_world = then_leave
        try:
            here = torch.ones(1)
            dist.all_reduce(here)
            return here.item()
        finally:
            default_group.ensure_world = ensure

    @endpoint
    def use_after_a_round_that_was_ended_first(self) -> bool:
        """Return whether the group after a late call has new connections."""
        import torch.distributed as dist

        from monarch._groups.breaking import spoil_generation
        from monarch._tensors.torch_compat import backend_of
        from monarch.exceptions import GroupError

        self.ensure()
        old = backend_of(dist.group.WORLD, "cpu")
        spoil_generation(REASON, self.own.generation + 1)
        with pytest.raises(GroupError, match=REASON):
            self.ensure()
        self.ensure()
        return backend_of(dist.group.WORLD, "cpu") is not old

    @endpoint
    def use_while_the_first_rank_is_replaced(self) -> None:
        """Wait for a generation which a process was asked to begin that is no longer the first rank."""
        from monarch._groups.convening import renew

        self.own.asked = "another process"
        promise = self.own.expect().promise
        assert promise is not None
        renew(self.own.procs(), self.own.roster + 1)
        promise.get(10)

    @endpoint
    def spoil_before_there_are_connections(self) -> str:
        """Return the error of a use of the group if a rank died when this one had only begun to join."""
        from monarch._groups.breaking import spoil
        from monarch.exceptions import GroupError

        form, begun = self.own._form, threading.Event()

        def form_late(*args: Any) -> None:
            begun.set()
            assert wait_until(lambda: self.own.broken)
            form(*args)

        self.own._form = form_late  # pyright: ignore[reportAttributeAccessIssue]
        thread = threading.Thread(target=lambda: begun.wait(20) and spoil(REASON))
        thread.start()
        try:
            self.ensure()
        except GroupError as error:
            return str(error)
        finally:
            thread.join(20)
            del self.own._form
        return "used the group"

    @endpoint
    def ignore_calls_to_generations(self) -> None:
        """Makes this rank one that no generation can form with, as if it had died on the way."""
        self.own.join = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    def spoil_while_the_others_are_awaited(self) -> str:
        """Return the error of a use of the group that waits for the other ranks, once the generation is spoiled."""
        from monarch._tensors.collectives import world as worlds
        from monarch.exceptions import GroupError

        meet, begun, raised = worlds.meet, threading.Event(), list[str]()

        def announce(*args: Any) -> Any:
            begun.set()
            return meet(*args)

        def use() -> None:
            try:
                self.ensure()
            except GroupError as error:
                raised.append(str(error))

        worlds.meet = announce
        try:
            thread = threading.Thread(target=use)
            thread.start()
            assert begun.wait(20)
            self.own.spoil(REASON)
            # Ranks that do not come are given up after 60 s.
            thread.join(30)
        finally:
            worlds.meet = meet
        return raised[0] if raised else "still waits"

    @endpoint
    def free_late(self, number: int) -> str:
        """Aborts what this call waits in, like a Stop; in another thread, like the receiving one."""
        from monarch._actors.running import current
        from monarch._python.frames import frame_of, is_between_calls
        from monarch._supervision.freeing import free

        self.ensure()
        here = current.get()
        assert here is not None
        waits: list[int] = []
        ended: list[Any] = []

        def ask() -> None:
            while not waits or (frame := frame_of(waits[0])) is None or is_between_calls(frame):
                time.sleep(0.001)
            ended.append(free(here[0].key, here[1].src, here[1].port, REASON, self.own.generation + number))

        thread = threading.Thread(target=ask)
        thread.start()
        # In C code that neither sleeps nor waits for a condition, as a collective is.
        while not ended:
            waits.append(threading.get_ident())
            hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)
        thread.join(20)
        return ended[0].name


@pytest.fixture
def member(procs: Callable[..., Any]) -> Any:
    return procs(1).spawn("member", Member)


def test_spoiled_generation_frees_the_rank_that_convenes(procs: Callable[..., Any]) -> None:
    members = procs(2).spawn("member", Member)
    members.slice(gpus=1).ignore_calls_to_generations.call_one().get(60)
    assert members.slice(gpus=0).spoil_while_the_others_are_awaited.call_one().get(60) == REASON


def test_replacement_of_the_first_rank_frees_ranks_that_asked_it(member: Any) -> None:
    with pytest.raises(ActorError, match="were replaced, added or removed; the next use of the group recreates it"):
        member.use_while_the_first_rank_is_replaced.call_one().get(60)
    assert member.total.call_one().get(60) == 1.0


def test_generation_may_be_spoiled_before_it_has_connections(member: Any) -> None:
    assert member.spoil_before_there_are_connections.call_one().get(60) == REASON
    assert member.total.call_one().get(60) == 1.0


def test_use_waits_until_old_groups_are_left(member: Any) -> None:
    assert member.use_while_the_old_world_is_left.call_one().get(60) == (True, True)
    assert member.total.call_one().get(60) == 1.0


def test_use_has_the_group_that_replaced_another(member: Any) -> None:
    assert member.use_while_the_world_is_replaced.call_one().get(60) == 1.0


def test_groups_are_new_after_ended_generation(member: Any) -> None:
    assert member.use_after_a_round_that_was_ended_first.call_one().get(60)
    assert member.total.call_one().get(60) == 1.0


def test_late_request_leaves_newer_groups_alone(procs: Callable[..., Any]) -> None:
    members = procs(2).spawn("members", Member)
    assert [*members.total.call().get(60).values()] == [2.0, 2.0]
    assert [*members.free_late.call(-1).get(60).values()] == ["NOTHING"] * 2
    assert [*members.total.call().get(60).values()] == [2.0, 2.0]
    # For its own generation, the request takes effect.
    assert "COLLECTIVE" in [*members.free_late.call(0).get(60).values()]


def test_first_rank_without_descriptors_is_named(procs: Callable[..., Any]) -> None:
    members = procs(3).spawn("members", Member)
    assert list(members.total.call().get(40).values()) == [3.0] * 3
    members.exhaust_descriptors.call().get(30)
    with pytest.raises(ActorError, match="could not create the process group"):
        members.total.call().get(40)
    members.free_descriptors.call().get(30)
    assert list(members.total.call().get(40).values()) == [3.0] * 3


def test_rank_without_descriptors_that_asks_is_named(procs: Callable[..., Any]) -> None:
    """It cannot even ask the first rank for a group, and no connection to it can be made."""
    members = procs(3).spawn("members", Member)
    # What the others wait in does not take longer to import there.
    members.imported.call().get(60)
    last = members.slice(gpus=2)
    last.forbid_descriptors.call_one().get(30)
    calls = [members.slice(gpus=rank).total.call_one() for rank in range(3)]
    assert "file descriptors" in str(calls[2].exception(20))
    for each in calls[:2]:
        assert "rank 2 cannot join the process group: " in str(each.exception(20))
    last.free_descriptors.call_one().get(30)

    def works() -> bool:
        # The refusal counts for some seconds.
        with suppress(ActorError):
            return list(members.total.call().get(40).values()) == [3.0] * 3
        return False

    assert wait_until(works)


@pytest.mark.parametrize("starved", [0, 2])
def test_rank_without_descriptors_is_named_without_asking(procs: Callable[..., Any], starved: int) -> None:
    """It accepts no connection, so it never hears of the group for which the others wait."""
    members = procs(3).spawn("members", Member)
    members.imported.call().get(60)
    members.slice(gpus=starved).forbid_descriptors.call_one().get(30)
    others = [members.slice(gpus=rank).total.call_one() for rank in range(3) if rank != starved]
    for each in others:
        said = str(each.exception(30))
        assert f"rank {starved}" in said and "Too many open files" in said
    members.slice(gpus=starved).free_descriptors.call_one().get(30)
    assert list(members.total.call().get(40).values()) == [3.0] * 3
