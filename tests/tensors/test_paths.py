"""Messages on different paths: the late one of two is harmless (docs/wire-protocol.md, Between paths)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leaks import wait_until
from monarch._actors.running import current
from monarch._groups.convening import tell_of_new_ones
from monarch._node.current import current_node
from monarch._node.remote_errors import pack_failure
from monarch._wire import messages as m
from monarch.actor import Actor, current_rank, endpoint, heal_mesh, supervise
from monarch.distributed import group


class Trainer(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def total(self, go: str = "") -> float:
        import torch
        import torch.distributed as dist

        here, made = torch.ones(1), group()
        # One comes later, when the others wait in the collective.
        assert not go or current_rank().rank or wait_until(lambda: os.path.exists(go), 60)
        dist.all_reduce(here, group=made)
        return here.item()

    @endpoint
    def stray(self, stale: bool) -> str:
        """A signal arrives, meant for this message or for the one before it."""
        here = current.get()
        assert here is not None
        cell: Any = here[0]
        call = here[1]
        other = m.Call(call.src, call.actor, "before", call.port, b"", "", 0, b"")
        cell.executor.meant = cell, other if stale else call
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return "interrupted"
        return "went on"


def values(future: Any) -> list[Any]:
    return list(future.get(60).values())


def test_late_news_of_replaced_ranks_keep_new_groups(procs: Callable[..., Any], tmp_path: Path) -> None:
    mesh = procs(3)
    trainers = mesh.spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [3.0] * 3
    with supervise(mesh, lambda failure: True):
        os.kill(values(trainers.pid.call())[1], signal.SIGKILL)
        peer = trainers._members_at().peers[1]
        assert wait_until(lambda: peer.dead is not None)
        heal_mesh(mesh)
    assert values(trainers.total.call()) == [3.0] * 3
    going = trainers.total.call(str(tmp_path / "go"))
    # The heal's own message, delivered late.
    tell_of_new_ones(mesh._state.procs)
    (tmp_path / "go").touch()
    assert values(going) == [3.0] * 3


def test_late_fault_of_replaced_process_is_not_its_successors(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    trainers = mesh.spawn("trainers", Trainer)
    pids = values(trainers.pid.call())
    old = trainers._members_at().peers[1]
    with supervise(mesh, lambda failure: True):
        os.kill(pids[1], signal.SIGKILL)
        assert wait_until(lambda: old.dead is not None)
        heal_mesh(mesh)
        fresh = values(trainers.pid.call())[1]
        current_node().events.faulted.tell(m.Fault(old.proc, trainers._key, 1, pack_failure(ValueError("late"))))
        assert not trainers._state.failed
        heal_mesh(mesh)
    assert values(trainers.pid.call())[1] == fresh


def test_signal_for_previous_message_does_not_interrupt(procs: Callable[..., Any]) -> None:
    trainer = procs(1).spawn("trainers", Trainer)
    assert trainer.stray.call_one(True).get(30) == "went on"
    assert trainer.stray.call_one(False).get(30) == "interrupted"
