"""Transfers of state that end while an actor is busy: what it gives for them afterwards is not kept in its rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._meshes.actors import sending
from monarch._meshes.actors.ask import ask, endpoint_of
from monarch._node.current import current_node
from monarch._state import ended
from monarch._state.checkpoint import worker
from monarch._state.checkpoint.api import checkpoint
from monarch._state.copy import endpoints
from monarch._state.copy.copying import copy_state
from monarch._state.handoff import receiver
from monarch._state.handoff.sender import StateTransfer
from monarch.actor import Actor, endpoint
from monarch.exceptions import CallTimeoutError, SupervisionError

SOON = 60


class Model(Actor):
    def __init__(self) -> None:
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        import torch

        self.given += 1
        return {"w": torch.zeros(1000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def times_given(self) -> int:
        return self.given

    @endpoint
    def wait_for_file(self, path: str) -> None:
        assert wait_until(lambda: os.path.exists(path), SOON)

    @endpoint
    def wait_for_death(self, proc: str) -> None:
        known = current_node().peers.known
        assert wait_until(lambda: proc in known and known[proc].dead is not None, SOON)


class Coordinator(Actor):
    @endpoint
    def where(self) -> tuple[str, int]:
        return current_node().proc, os.getpid()

    @endpoint
    def ask_for_copy(self, model: Any) -> None:
        answer = endpoint_of(model, worker.stage).call_one(current_node().proc, "token", "state_dict", ())
        # The rank has the request when it answers a later one.
        assert ask(model, worker.still_open).get(SOON) == {0: 0}
        assert not answer.done


def test_rank_drops_its_copy_for_a_checkpoint_that_has_failed(procs: Any, tmp_path: Path) -> None:
    models = procs(2).spawn("models", Model)
    second, go = models.slice(gpus=1), tmp_path / "go"
    first, _ = models.pid.call().get(SOON).values()
    busy = [models.slice(gpus=rank).wait_for_file.call_one(str(go)) for rank in range(2)]
    saved = checkpoint(models, tmp_path / "run")
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="rank 0"):
        saved.get(SOON)
    # The rank has the end of the checkpoint when it answers this.
    assert ask(second, worker.still_open).get(SOON) == {0: 0}
    assert all(isinstance(each.exception(SOON), SupervisionError) for each in busy)
    go.touch()
    assert second.times_given.call_one().get(SOON) == 1
    assert wait_until(lambda: ask(second, worker.still_open).get(SOON) == {0: 0})


def test_rank_ends_its_exports_for_a_copy_that_has_failed(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2)
    models = mesh.spawn("models", Model)
    target = mesh.spawn("targets", Model).slice(gpus=1)
    second, go = models.slice(gpus=1), tmp_path / "go"
    first, _ = models.pid.call().get(SOON).values()
    busy = [models.slice(gpus=rank).wait_for_file.call_one(str(go)) for rank in range(2)]
    copied = copy_state(models.state_dict, target.state_dict)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="rank 0"):
        copied.get(SOON)
    # The rank has ended the copy when it has done this.
    ask(second, endpoints.end, "another").get(SOON)
    assert all(isinstance(each.exception(SOON), SupervisionError) for each in busy)
    go.touch()
    assert second.times_given.call_one().get(SOON) == 1 and target.times_given.call_one().get(SOON) == 1
    assert ask(second, endpoints.still_open).get(SOON) == {0: 0}


def test_rank_ends_its_exports_for_a_handoff_that_was_too_late(procs: Any, tmp_path: Path) -> None:
    models = procs(2).spawn("models", Model)
    first, go = models.slice(gpus=0), tmp_path / "go"
    busy = first.wait_for_file.call_one(str(go))
    with pytest.raises(CallTimeoutError):
        StateTransfer(models, [1], 0).run(0.1)
    # The rank has ended the transfer when it has done this.
    ask(first, receiver.end, "another").get(SOON)
    go.touch()
    busy.get(SOON)
    assert first.times_given.call_one().get(SOON) == 1
    assert ask(first, receiver.still_given).get(SOON) == {0: 0}


def test_rank_drops_its_copy_for_a_coordinator_that_has_died(procs: Any) -> None:
    model, coordinator = procs(1).spawn("model", Model), procs(1).spawn("coordinator", Coordinator)
    proc, pid = coordinator.where.call_one().get(SOON)
    busy = model.wait_for_death.call_one(proc)
    coordinator.ask_for_copy.call_one(model).get(SOON)
    os.kill(pid, signal.SIGKILL)
    busy.get(SOON)
    assert model.times_given.call_one().get(SOON) == 1
    assert wait_until(lambda: ask(model, worker.still_open).get(SOON) == {0: 0})


def test_rank_drops_its_copy_for_an_interrupted_checkpoint(
    procs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = procs(1).spawn("model", Model)
    model.pid.call_one().get(SOON)
    take = sending.take_all

    def interrupted(receivers: Any, cost: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return take(receivers, cost)

    with monkeypatch.context() as patch:
        patch.setattr(sending, "take_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint(model, tmp_path)
    assert model.times_given.call_one().get(SOON) == 1
    assert wait_until(lambda: ask(model, worker.still_open).get(SOON) == {0: 0})


def test_only_the_last_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "_KEPT", 2)
    monkeypatch.setattr(ended, "_ended", {})
    for token in ("first", "second", "second", "third"):
        ended.note_end(token)
    assert [ended.has_ended(token) for token in ("first", "second", "third", "none")] == [False, True, True, False]
