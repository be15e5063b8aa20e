"""``to_mesh`` and pipelines: tensors from rank to rank of another mesh, forward and backward, failures and deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch as torch_
import torch.nn.functional as F
from torch import nn

import monarch
from leaks import wait_until
from monarch._engine.meshes.tensor_mesh import tensor_mesh_of
from monarch._node.current import current_node
from monarch.distributed import Mesh
from monarch.exceptions import ArgumentError, DeviceMeshError, MeshOpError, ShapeError, TensorError

torch: Any = torch_
# The first mesh starts the session; alone, a test that makes its own would count that as left behind.
pytestmark = pytest.mark.usefixtures("pair")


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Any]:
    made = [Mesh(shape=(2,), mesh_dim_names=("gpus",)) for _ in range(2)]
    # Later, connections to ranks would count as opened by a test.
    assert all(mesh.execute(os.getpid).values() for mesh in made)
    yield made
    for mesh in made:
        mesh.stop().get(30)


@pytest.fixture
def pair(shared_pair: Any, leaks: Any) -> Any:
    return shared_pair


def values(tensor: Any, size: int = 2) -> list[Any]:
    return [monarch.inspect(tensor, gpus=rank).tolist() for rank in range(size)]


def waiting(mesh: Any) -> int:
    """How many values the ranks of a mesh keep for others."""
    return sum(mesh.execute(count_exports).values())


def count_exports() -> int:
    from monarch._engine.rank.operations.moving import exports

    return exports.count()


def test_a_copy_has_the_values_of_its_moment(pair: Any) -> None:
    first, second = pair
    with first.activate():
        x = torch.ones(3) * (first.rank_tensor("gpus") + 1)
    moved = x.to_mesh(second)
    x.zero_()
    assert moved.mesh is second
    assert values(moved * 2) == [[2] * 3, [4] * 3]
    assert values(x) == [[0] * 3] * 2
    there_and_back = monarch.to_mesh({"a": [moved, 1]}, first)["a"][0]
    assert values(there_and_back + x) == [[1] * 3, [2] * 3]
    del moved, there_and_back
    wait_until(lambda: waiting(first) == waiting(second) == 0, 20)


@pytest.mark.parametrize("dtype", ["bool", "int64", "bfloat16", "complex64", "float64"])
def test_dtypes_and_shapes_move(pair: Any, dtype: str) -> None:
    first, second = pair
    kind = getattr(torch, dtype)
    value = torch.arange(6).reshape(2, 3).to(kind)
    for given in (value.T, value[:0], value[0, 0]):
        own: Any = monarch.distribute(given, first).to_local()
        assert torch.equal(monarch.inspect(own.to_mesh(second)), given)
    own: Any = monarch.distribute(value, first).to_local()
    assert torch.equal(monarch.inspect(own.T.to_mesh(second), gpus=1), value.T)


def test_divided_tensors_move_and_gradients_come_back(pair: Any) -> None:
    first, second = pair
    x = monarch.distribute(torch.arange(5.0), first, ["gpus"]).requires_grad_()
    y = x.to_mesh(second)
    assert y.spec == x.spec and y.full_tensor().tolist() == [0, 1, 2, 3, 4]
    (y * y).sum().backward()
    assert x.grad.mesh is first and x.grad.full_tensor().tolist() == [0, 2, 4, 6, 8]


def test_slices_of_a_mesh_move_among_their_ranks(leaks: Any) -> None:
    mesh = Mesh(shape=(2, 2), mesh_dim_names=("stage", "gpus"))
    stages = [mesh.slice(stage=stage) for stage in range(2)]
    with stages[0].activate():
        x = torch.ones(2) * stages[0].rank_tensor("gpus")
    x.requires_grad_()
    y = x.to_mesh(stages[1])
    assert values(y + 1) == [[1, 1], [2, 2]]
    (y * 3).sum().backward()
    assert values(x.grad) == [[3, 3]] * 2
    # More axes: each rank along them gets the same, and gradients are summed.
    wide = x.to_mesh(mesh)
    assert monarch.inspect(wide, stage=1, gpus=1).tolist() == [1, 1]
    x.grad = None
    (wide * wide).sum().backward()
    assert values(x.grad) == [[0, 0], [4, 4]]
    assert waiting(mesh) == 0
    mesh.stop().get(30)


def test_wrong_moves_raise_at_the_line(pair: Any, leaks: Any) -> None:
    first, second = pair
    with first.activate():
        x = torch.ones(2)
    with second.activate():
        y = torch.ones(2)
    with pytest.raises(MeshOpError, match=r"different meshes: .* move one with tensor.to_mesh\(mesh\)"):
        _ = x + y
    with pytest.raises(ShapeError, match="different sizes"):
        x.to_mesh(second.slice(gpus=slice(0, 1)))
    with pytest.raises(ArgumentError, match=r"use monarch\.distribute"):
        monarch.to_mesh(torch.ones(2), first)
    with pytest.raises(ArgumentError, match="expected a Stream"):
        x.to_mesh(second, 3)
    sharded = monarch.ones(2, mesh=first)
    with pytest.raises(MeshOpError, match="call it between the steps"):
        monarch.compile(lambda x: x.to_mesh(second))(sharded)


def test_a_failure_arrives_on_the_other_mesh(pair: Any) -> None:
    first, second = pair
    with first.activate():
        index = first.rank_tensor("gpus")[None] * 9
        rows: Any = F.embedding(index, torch.ones(4, 2))
        good = torch.ones(2)
    moved, fine = rows.to_mesh(second) + 1, good.to_mesh(second) + 1
    with second.activate():
        other = torch.zeros(2)
    with pytest.raises(TensorError, match=r"aten::embedding failed on rank 1 of") as raised:
        monarch.inspect(moved.to_mesh(first))
    assert "test_moving.py" in str(raised.value)
    assert values(fine.to_mesh(first)) == [[2, 2]] * 2
    assert values(other.reduce()) == [[0, 0]] * 2
    assert waiting(first) == waiting(second) == 0


def stage(width: int, seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.GELU())


def test_pipeline_of_two_meshes_equals_one_process(pair: Any) -> None:
    data, target = torch.randn(4, 8, 6), torch.randn(4, 8, 6)
    expected = nn.Sequential(stage(6, 1), stage(6, 2))
    stages = [monarch.module_to_mesh(stage(6, number + 1), mesh) for number, mesh in enumerate(pair)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (*stages, expected)]
    for _ in range(3):
        theirs = torch.stack([F.mse_loss(expected(x), y) for x, y in zip(data, target, strict=True)]).mean()
        theirs.backward()
        losses = []
        for x, y in zip(data, target, strict=True):
            middle = stages[0](monarch.distribute(x, pair[0], ["gpus", None])).to_mesh(pair[1])
            loss = F.mse_loss(stages[1](middle), monarch.distribute(y, pair[1], ["gpus", None])) / len(data)
            loss.backward()
            losses.append(loss.detach())
        assert abs(float(sum(losses)) - theirs.item()) < 1e-4
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours = [each for model in stages for each in model.parameters()]
    for mine, other in zip(ours, expected.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other.detach(), atol=1e-5, rtol=1e-5)


def test_recorded_stages_run_1f1b(pair: Any) -> None:
    data = torch.randn(4, 8, 6)
    expected = nn.Sequential(stage(6, 1), stage(6, 2))
    stages = [monarch.module_to_mesh(stage(6, number + 1), mesh) for number, mesh in enumerate(pair)]

    @monarch.compile
    def forward(x: Any) -> Any:
        with torch.no_grad():
            return stages[0](x)

    @monarch.compile
    def last(x: Any) -> Any:
        x = x.detach().requires_grad_()
        loss = stages[1](x).square().mean()
        loss.backward()
        return loss.detach(), x.grad

    @monarch.compile
    def backward(x: Any, grad: Any) -> None:
        stages[0](x).backward(grad)

    batches = [monarch.distribute(each, pair[0], ["gpus", None]) for each in data]
    for _ in range(3):
        for parameter in (each for model in (*stages, expected) for each in model.parameters()):
            parameter.grad = torch.zeros_like(parameter)
        pending: list[Any] = []
        losses: list[Any] = []
        for x in batches:
            loss, grad = last(forward(x).to_mesh(pair[1]))
            losses.append(loss)
            pending.append((x, grad.to_mesh(pair[0])))
            if len(pending) > 1:
                backward(*pending.pop(0))
        for each in pending:
            backward(*each)
        theirs: Any = sum(expected(x).square().mean() for x in data)
        theirs.backward()
        assert abs(float(sum(losses)) - theirs.item()) < 1e-4
        ours = [each for model in stages for each in model.parameters()]
        for mine, other in zip(ours, expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad, atol=1e-4, rtol=1e-4)


def slow(x: Any) -> Any:
    time.sleep(0.2)
    return x + 1


def test_stop_in_the_middle_keeps_both_meshes(pair: Any) -> None:
    first, second = pair
    function = monarch.remote(slow, propagate=lambda x: x + 1)
    with first.activate():
        x = torch.zeros(2)
    for _ in range(5):
        x = function(x)
    moved = x.to_mesh(second)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        monarch.inspect(moved)
    timer.join()
    # The ops that were issued have run to their end, in order.
    assert values(moved + 1) == [[6, 6]] * 2
    assert values(x) == [[5, 5]] * 2


def is_dead(mesh: Any, pids: list[int]) -> bool:
    try:
        return mesh.execute(os.getpid).values() != pids
    except DeviceMeshError:
        return True


@pytest.mark.parametrize("when", ["known", "before", "during"])
def test_death_of_a_sender_fails_what_it_would_have_sent(leaks: Any, when: str) -> None:
    first, second = (Mesh(shape=(2,), mesh_dim_names=("gpus",)) for _ in range(2))
    function = monarch.remote(slow, propagate=lambda x: x + 1)
    with first.activate():
        x = torch.zeros(2)
    with second.activate():
        other = torch.ones(2)
    monarch.inspect(x.to_mesh(second))
    pids = first.execute(os.getpid).values()
    if when == "during":
        for _ in range(10):
            x = function(x)
        moved = x.to_mesh(second) + 1
        timer = threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL))
        timer.start()
    else:
        os.kill(pids[1], signal.SIGKILL)
        # What the program knows of, it sends no ops to the other rank either.
        assert when == "before" or wait_until(lambda: is_dead(first, pids))
        timer = threading.Timer(0, int)
        timer.start()
        moved = x.to_mesh(second) + 1
    with pytest.raises(DeviceMeshError, match="died"):
        for _ in range(100):
            monarch.inspect(moved)
            moved = x.to_mesh(second) + 1
    timer.join()
    assert values(other.reduce()) == [[2, 2]] * 2
    monarch.heal_mesh(first)
    with first.activate():
        again = torch.full((2,), 3.0)
    assert values(again.to_mesh(second)) == [[3, 3]] * 2
    assert waiting(second) == 0
    for mesh in (first, second):
        mesh.stop().get(30)


def after(x: Any, path: str) -> Any:
    """Return a copy once there is a file."""
    assert wait_until(lambda: os.path.exists(path), 60)
    return x.clone()


def test_slow_receiver_is_told_of_a_dropped_copy_of_failed_value(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    rows: Any = F.embedding(monarch.distribute(torch.tensor([0, 9]), first, ["gpus"]), monarch.ones(3, 2, mesh=first))
    with pytest.raises(TensorError, match="embedding failed"):
        rows.sum().item()
    late = monarch.remote(after, propagate=lambda x, path: x.clone())
    with second.activate():
        late(torch.ones(1), str(tmp_path / "go"))
    # The program keeps no reference to the copy itself, so the sender forgets it before the receiver asks.
    moved = rows.to_mesh(second) + 1
    assert monarch.ones(3, mesh=first).sum().item() == 3
    (tmp_path / "go").touch()
    with pytest.raises(TensorError, match="embedding failed"):
        moved.sum().item()
    assert waiting(first) == 0


def test_copy_cancelled_by_a_healing_is_told_to_a_slow_receiver(leaks: Any, tmp_path: Path) -> None:
    first, second = (Mesh(shape=(2,), mesh_dim_names=("gpus",)) for _ in range(2))
    x = monarch.ones(2, mesh=first)
    assert x.to_mesh(second).sum().item() == 2
    late = monarch.remote(after, propagate=lambda x, path: x.clone())
    with second.activate():
        late(torch.ones(1), str(tmp_path / "go"))
    pids = first.execute(os.getpid).values()
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: is_dead(first, pids))
    # The mesh with the dead rank gets no ops, so that the healing cancels what it would have sent.
    moved = x.to_mesh(second) + 1
    monarch.heal_mesh(first)
    (tmp_path / "go").touch()
    with pytest.raises(
        DeviceMeshError, match=r"died before all of its ranks had (sent the tensor|read it); move it again"
    ):
        # A rank with a copy of its own may answer before the failure of the other one is known.
        while True:
            moved.sum().item()
    assert x.to_mesh(second).sum().item() == 2
    for mesh in (first, second):
        mesh.stop().get(30)


@pytest.mark.parametrize("asks", ["before", "after"])
def test_op_at_a_new_rank_before_its_healing_is_cancelled(leaks: Any, tmp_path: Path, asks: str) -> None:
    first, second = (Mesh(shape=(2,), mesh_dim_names=("gpus",)) for _ in range(2))
    x = monarch.ones(2, mesh=first)
    assert x.to_mesh(second).sum().item() == 2
    late = monarch.remote(after, propagate=lambda x, path: x.clone())
    with second.activate():
        late(torch.ones(1), str(tmp_path / "go"))
    stream = tensor_mesh_of(first).stream
    events = current_node().events
    pids = first.execute(os.getpid).values()
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: is_dead(first, pids))
    moved = x.to_mesh(second) + 1

    def early(uid: str, replaced: list[int]) -> None:
        # As the timer does if it runs out between the replacement of the rank and the healing of its tensors.
        stream.flush()
        if asks == "before":
            (tmp_path / "go").touch()

    before = events.healed.subscribers
    events.healed.subscribers = (early, *before)
    try:
        monarch.heal_mesh(first)
    finally:
        events.healed.subscribers = before
        (tmp_path / "go").touch()
    with pytest.raises(DeviceMeshError, match=r"(?s)died.*move it again"):
        # The first rank, which is asked for it, may have read its own copy before it hears of the failure.
        wait_until(lambda: moved.sum().item() < 0)
    assert x.to_mesh(second).sum().item() == 2
    for mesh in (first, second):
        mesh.stop().get(30)


def test_ranks_go_on_aside_only_while_no_mesh_runs_ops(pair: Any, tmp_path: Path) -> None:
    first, second = pair
    assert monarch.ones(1, mesh=first).to_mesh(second).sum().item() == 1
    recovery = tensor_mesh_of(first).recovery
    late = monarch.remote(after, propagate=lambda x, path: x.clone())
    with second.activate():
        late(torch.ones(1), str(tmp_path / "go"))
    rows: Any = F.embedding(monarch.distribute(torch.tensor([0, 9]), first, ["gpus"]), monarch.ones(3, 2, mesh=first))
    assert wait_until(lambda: recovery.is_due)
    # A healing of any mesh, which this would hold up, does not wait for the function on the second mesh.
    assert recovery.recover_aside()
    (tmp_path / "go").touch()
    assert wait_until(lambda: bool(recovery.unreported))
    with pytest.raises(TensorError, match="embedding failed"):
        rows.sum().item()


def test_death_of_a_receiver_leaves_nothing_on_the_sender(leaks: Any) -> None:
    first, second = (Mesh(shape=(2,), mesh_dim_names=("gpus",)) for _ in range(2))
    with first.activate():
        x = torch.ones(2)
    monarch.inspect(x.to_mesh(second))
    os.kill(second.execute(os.getpid).values()[0], signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match="rank 0"):
        for _ in range(1000):
            monarch.inspect(x.to_mesh(second))
    monarch.heal_mesh(second)
    assert values(x.to_mesh(second)) == [[1, 1]] * 2
    assert wait_until(lambda: waiting(first) == 0, 20)
    for mesh in (first, second):
        mesh.stop().get(30)
