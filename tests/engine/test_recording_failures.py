"""Failures in the middle of a recorded step: as in unrecorded streams, what has no value says why, the rest goes on."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from leaks import wait_until
from monarch.distributed import Mesh
from monarch.exceptions import ArgumentError, DeviceMeshError, TensorError


def test_error_in_a_replay_fails_its_results_with_the_line(mesh: Any) -> None:
    table = monarch.distribute(torch.arange(8.0)[:, None].expand(8, 4).contiguous(), mesh)
    changed, other = monarch.zeros(4, mesh=mesh), monarch.ones(4, mesh=mesh, spec=["dp"])

    @monarch.compile
    def step(indices: Any) -> Any:
        rows = F.embedding(indices, table)
        changed.add_(rows.sum())
        return rows

    def indices(wrong: int) -> Any:
        return monarch.distribute(torch.tensor([0, 1, 2, wrong]), mesh, ["dp"])

    for _ in range(3):
        assert step(indices(3)).sum().item() == 24
    rows = step(indices(99))
    with pytest.raises(TensorError, match=r"aten::embedding failed on ranks? [23].* of mesh: IndexError") as raised:
        rows.sum().item()
    assert "rows = F.embedding(indices, table)" in str(raised.value)
    with pytest.raises(TensorError, match="embedding failed"):
        changed.sum().item()
    assert other.sum().item() == 4 and table.sum().item() == 112
    # What the step changes has no value, so neither has its next call.
    with pytest.raises(TensorError, match="embedding failed"):
        step(indices(3)).sum().item()


def test_failed_check_in_a_step_is_named(mesh: Any) -> None:
    step = monarch.compile(lambda x: torch.linalg.inv(x).sum())
    eye = monarch.distribute(torch.eye(3), mesh)
    assert [step(eye).item() for _ in range(3)] == [3, 3, 3]
    with pytest.raises(TensorError, match=r"the check of linalg\.inv failed"):
        step(monarch.zeros(3, 3, mesh=mesh)).item()
    assert step(eye).item() == 3


def test_step_on_a_tensor_without_a_value_says_why(mesh: Any) -> None:
    broken = torch.linalg.inv(monarch.zeros(3, 3, mesh=mesh))
    step = monarch.compile(lambda x: x * 2)
    with pytest.raises(TensorError, match=r"the check of linalg\.inv failed"):
        step(broken).sum().item()


def test_rank_local_tensors_in_a_step_are_refused(mesh: Any) -> None:
    with mesh.activate():
        own = torch.ones(4)

    def multiplies(x: Any) -> Any:
        return own * 2

    def changes(x: Any) -> Any:
        own.add_(1)
        return x * 2

    def makes(x: Any) -> Any:
        with mesh.activate():
            torch.zeros(4)
        return x * 2

    def converts(x: Any) -> Any:
        return x.to_local() * 2

    for step in (multiplies, changes, makes, converts):
        with pytest.raises(ArgumentError, match=rf"{step.__name__} cannot .* rank-local .*test_recording_failures.py"):
            monarch.compile(step)(monarch.ones(4, mesh=mesh))
    assert torch.equal(monarch.inspect(own, dp=0, mp=0), torch.ones(4))


def test_failure_without_changes_leaves_the_recording_usable(mesh: Any) -> None:
    table = monarch.distribute(torch.arange(8.0)[:, None].expand(8, 4).contiguous(), mesh)

    @monarch.compile
    def step(indices: Any) -> Any:
        return F.embedding(indices, table).sum()

    found = [step(monarch.distribute(torch.tensor([0, 1, 2, at]), mesh, ["dp"])) for at in (3, 4, 99, 5)]
    assert [found[at].item() for at in (0, 1, 3)] == [24, 28, 32]
    with pytest.raises(TensorError, match="embedding failed"):
        found[2].item()


def trainer(mesh: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = monarch.module_to_mesh(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4)), mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    x = monarch.randn(64, 256, mesh=mesh, spec=["dp", None])

    @monarch.compile
    def step(x: Any) -> Any:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    return model, step, x


def test_kill_in_the_middle_of_replays_is_raised(leaks: Any) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    pids = mesh.execute(os.getpid).values()
    _, step, x = trainer(mesh)
    for _ in range(5):
        step(x).item()
    killer = threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL))
    killer.start()
    with pytest.raises(DeviceMeshError, match="rank 1"):
        for _ in range(100_000):
            step(x).item()
    killer.join()
    mesh.stop().get(30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_stop_in_the_middle_of_replays_leaves_replicas_equal(mesh: Any) -> None:
    model, step, x = trainer(mesh)
    for _ in range(5):
        step(x).item()
    before = step.graph().code
    done: list[int] = []

    over = threading.Event()

    def interrupt() -> None:
        wait_until(lambda: len(done) > 20)
        # Python drops one that arrives in a finalizer.
        while not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(5)

    thread = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            for at in range(1_000_000):
                step(x)
                done.append(at)
    finally:
        over.set()
        thread.join()
    assert step(x).item() > 0
    weight = model[0].weight
    parts = [monarch.fetch(weight.detach(), dp=dp, mp=mp) for dp in range(2) for mp in range(2)]
    assert all(torch.equal(parts[0], each) for each in parts[1:])
    assert step.graph().code == before
