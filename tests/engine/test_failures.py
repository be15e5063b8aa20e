"""Failures of ops on ranks, deaths and stops: what has no value says why, and the rest goes on."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import monarch
from leaks import Kit, wait_until
from monarch._engine.dtensor_compat import mesh_without_groups, set_apart
from monarch._engine.meshes import recovery
from monarch._engine.meshes.tensor_mesh import tensor_mesh_of
from monarch._engine.rank.recovery import renewing
from monarch._node.current import current_node
from monarch.distributed import Mesh, device_mesh
from monarch.exceptions import DeviceMeshError, GroupError, TensorError

TABLE = torch.arange(8.0)[:, None].expand(8, 4).contiguous()


def looked_up(mesh: Any, wrong: int) -> Any:
    """Rows of a table; a wrong index fails on the ranks with that part of the indices only."""
    indices = torch.tensor([0, 1, 2, wrong])
    return F.embedding(monarch.distribute(indices, mesh, ["dp"]), monarch.distribute(TABLE, mesh, None))


def test_op_that_fails_on_some_ranks_names_line_and_ranks(mesh: Any) -> None:
    other = monarch.ones(4, mesh=mesh, spec=["dp"])
    rows = looked_up(mesh, 99)
    later, independent = rows.sum() + 1, (other * 3).sum()
    with pytest.raises(TensorError, match=r"aten::embedding failed on ranks 2-3 of mesh: IndexError") as raised:
        later.item()
    assert "test_failures.py" in str(raised.value) and "in looked_up" in str(raised.value)
    assert raised.value.ranks == (2, 3)
    # What does not depend on it has a value, also if it needs a collective after the failure.
    assert independent.item() == 12 and other.sum().item() == 4
    with pytest.raises(TensorError, match="embedding failed"):
        rows.full_tensor()
    assert "no value: " in repr(rows)
    assert looked_up(mesh, 3).sum().item() == 24


def test_waits_for_ops_on_tensors_are_told_as_such(
    mesh: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait_for(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    slow = monarch.remote(wait_for, propagate=lambda *_: ())
    told: list[str] = []

    def is_told() -> bool:
        told.append(capfd.readouterr().err)
        return "monarch: execute(getpid) is waiting: all 4 ranks still run ops on tensors, started" in "".join(told)

    with ThreadPoolExecutor(1) as pool:
        with mesh.activate():
            slow(str(tmp_path / "go"))
        pids = pool.submit(lambda: mesh.execute(os.getpid).values())
        try:
            assert wait_until(is_told), told
        finally:
            (tmp_path / "go").touch()
        assert len(pids.result(30)) == 4


def test_failed_op_fails_what_it_would_have_changed(mesh: Any) -> None:
    changed, kept = monarch.zeros(4, 4, mesh=mesh, spec=["dp", None]), monarch.zeros(4, 4, mesh=mesh, spec=["dp", None])
    changed += looked_up(mesh, 99)
    kept += looked_up(mesh, 3)
    for _ in range(100):
        kept += 0.5
    assert kept.sum().item() == 24 + 50 * 16
    with pytest.raises(TensorError, match="embedding failed"):
        changed.sum().item()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_failed_gradients_fail_the_parameters(mesh: Any, options: Any) -> None:
    parameters = [monarch.ones(4, 4, mesh=mesh).requires_grad_() for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, **options)
    parameters[0].grad, parameters[1].grad = looked_up(mesh, 99), looked_up(mesh, 3)
    optimizer.step()
    with pytest.raises(TensorError, match="embedding failed"):
        parameters[0].sum().item()


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.cholesky,
        torch.linalg.inv,
        lambda x: torch.linalg.solve(x, x),
        lambda x: torch.linalg.lu_factor(x)[0],
    ],
)
def test_checks_of_linalg_fail_the_results(mesh: Any, function: Any) -> None:
    zeros, eye = monarch.zeros(3, 3, mesh=mesh), monarch.distribute(torch.eye(3), mesh)
    with pytest.raises(
        TensorError, match=r"the check of (torch\.)?linalg\..* failed on ranks? .*LinAlgError|RuntimeError"
    ):
        function(zeros).sum().item()
    assert function(eye).sum().item() == 3
    with mesh.activate():
        local = function(torch.zeros(3, 3))
        with pytest.raises(TensorError, match=r"the check of (torch\.)?linalg"):
            monarch.inspect(local, dp=0, mp=0)
        assert monarch.inspect(function(torch.eye(3)), dp=0, mp=0).sum() == 3


def test_failed_assertion_fails_what_it_asserts(mesh: Any) -> None:
    x = monarch.zeros(1, mesh=mesh)
    torch._assert_async(x)  # type: ignore[no-untyped-call]
    with pytest.raises(TensorError, match="assert_async failed"):
        x.item()


def test_several_failures_each_say_their_own_cause(mesh: Any) -> None:
    first, second = looked_up(mesh, 99), looked_up(mesh, -7).sum()
    good = [looked_up(mesh, at).sum() for at in range(8)]
    assert [int(each.item()) for each in good] == [12 + 4 * at for at in range(8)]
    with pytest.raises(TensorError, match="embedding failed on ranks 2-3"):
        second.item()
    with pytest.raises(TensorError, match="embedding failed on ranks 2-3"):
        first.sum().item()


@pytest.mark.parametrize("axis", ["dp", "mp"])
def test_ops_around_a_failure_keep_their_values_on_two_axes(mesh: Any, axis: str) -> None:
    value = torch.arange(128.0 * 128).view(128, 128)
    x = monarch.distribute(value, mesh, ["dp", "mp"])
    table = monarch.distribute(TABLE, mesh, None)
    for _ in range(4):
        # Ranks that are behind complete collectives along both axes, which the ranks that fail have completed.
        before = [(x + at).replicate() * 2 for at in range(4)]
        bad = F.embedding(monarch.distribute(torch.tensor([0, 1, 2, 99]), mesh, [axis]), table)
        # Ranks that are ahead complete those along one axis, and wait for the others along the other one.
        rows = [(x + at).redistribute(["dp", None]) * 3 for at in range(4)]
        columns = [(x + at).redistribute([None, "mp"]) * 5 for at in range(4)]
        turned = [(x + at).redistribute(["mp", "dp"]) * 7 for at in range(4)]
        for factor, results in zip((2, 3, 5, 7), (before, rows, columns, turned), strict=True):
            for at, result in enumerate(results):
                assert torch.equal(result.full_tensor(), (value + at) * factor)
        with pytest.raises(TensorError, match="embedding failed"):
            bad.sum().item()


def powers() -> float:
    """A program of DTensors over the same ranks."""
    x = distribute_tensor(torch.zeros(4, 4), device_mesh(), [Shard(0), Shard(1)], src_data_rank=None)
    result: Any = x.exp()
    return float(result.full_tensor().sum())


def test_tensors_outlive_the_groups_of_user_code(mesh: Any, leaks: Kit) -> None:
    assert set(mesh.execute(powers).values()) == {16.0}
    # torch remembers the result of this op with the mesh of the code of the user.
    found = monarch.distribute(torch.zeros(4, 4), mesh, ["dp", "mp"]).exp()
    with pytest.raises(TensorError, match="embedding failed"):
        looked_up(mesh, 99).sum().item()
    assert found.replicate().sum().item() == 16
    leaks.rebase()


def test_meshes_of_tensors_differ_from_those_of_user_code() -> None:
    one, other = (mesh_without_groups("cpu", [0, 1], (2,), ("dp",)) for _ in range(2))
    assert one == other
    set_apart(other, 1)
    assert one != other and hash(one) != hash(other)


def test_dropped_tensors_leave_the_ranks(mesh: Any) -> None:
    def held() -> list[int]:
        return mesh.execute(count_parts, monarch.zeros(1, mesh=mesh)).values()

    before = held()
    kept = [monarch.zeros(10, mesh=mesh) for _ in range(50)]
    assert held() == [each + 50 for each in before]
    kept.clear()
    assert held() == before


@pytest.mark.parametrize("allocations", range(5, 100, 10))
def test_tensors_are_listed_while_garbage_collections_drop_some(mesh: Any, allocations: int) -> None:
    stream, kept = tensor_mesh_of(mesh).stream, [monarch.zeros(1, mesh=mesh) for _ in range(100)]
    before = gc.get_threshold()
    gc.disable()
    try:
        cycle: list[Any] = [monarch.zeros(1, mesh=mesh)]
        cycle.append(cycle)
        del cycle
        gc.set_threshold(gc.get_count()[0] + allocations, *before[1:])
        gc.enable()
        found = stream.tensors()
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert {each.monarch_ref.number for each in kept} <= {number for number, _ in found}


def count_parts(_: torch.Tensor) -> int:
    """Return how many tensors this rank holds."""
    import gc

    from torch.distributed.tensor import DTensor

    # Frames of an error in an op of an earlier test may be part of a cycle.
    gc.collect()
    return sum(type(each) is DTensor for each in gc.get_objects())


def test_death_of_a_rank_fails_looks_and_healing_goes_on(leaks: Any) -> None:
    mesh = Mesh(shape=(2, 2), mesh_dim_names=("dp", "mp"))
    pids = mesh.execute(os.getpid).values()
    whole = monarch.distribute(torch.arange(6.0), mesh)
    pairs = monarch.distribute(torch.arange(8.0).reshape(4, 2), mesh, ["dp", None])
    quarters = monarch.distribute(torch.arange(8.0).reshape(4, 2), mesh, ["dp", "mp"])
    assert whole.sum().item() == 15
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match="rank 3"):
        for _ in range(1000):
            pairs.sum().item()
    healed = monarch.heal_mesh(mesh)
    assert healed is mesh
    # Replicas have what the dead rank had.
    assert whole.sum().item() == 15 and torch.equal(monarch.fetch(whole, dp=1, mp=1), torch.arange(6.0))
    assert pairs.sum().item() == 28 and monarch.fetch(pairs, dp=1, mp=1).tolist() == [[4, 5], [6, 7]]
    with pytest.raises(DeviceMeshError, match=r"only on rank 3 .* died"):
        quarters.full_tensor()
    new = monarch.randn(4, 4, mesh=mesh, spec=["dp", "mp"])
    assert (new @ new.T).shape == (4, 4) and (new - new).abs().sum().item() == 0
    mesh.stop().get(30)


def break_next_groups() -> None:
    """Let the next process groups of this rank break while they are made."""
    from monarch._engine.rank.devices import meshes

    usual = meshes.groups_of

    def breaks(*args: Any) -> Any:
        meshes.groups_of = usual
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    meshes.groups_of = breaks


def begin_next_groups_late() -> None:
    """Let this rank make its next process groups only once another one has given them up."""
    from monarch._engine.rank.devices.meshes import RankMeshes
    from monarch._engine.rank.recovery.renewing import attempts

    usual, before = RankMeshes._made, attempts.abandoned

    def made(self: RankMeshes, region: Any) -> Any:
        RankMeshes._made = usual
        assert wait_until(lambda: attempts.abandoned != before)
        return usual(self, region)

    RankMeshes._made = made


@pytest.mark.parametrize("late", [False, True])
def test_recovery_goes_on_if_groups_break_while_they_are_made(mesh: Any, late: bool) -> None:
    x = monarch.distribute(torch.arange(8.0), mesh, ["dp"])
    mesh.slice(dp=1, mp=1).execute(break_next_groups)
    if late:
        mesh.slice(dp=0, mp=0).execute(begin_next_groups_late)
    failed = looked_up(mesh, 9)
    with pytest.raises(TensorError):
        failed.sum().item()
    # The other ranks, which wait in the making of the groups or are about to, are not left there.
    assert x.sum().item() == 28


def break_groups() -> None:
    from monarch._groups.rendezvous import local_rendezvous

    local_rendezvous().spoil("a test has broken it")


def has_groups_of_tensors() -> bool:
    """Make the next groups of this rank; return whether those of tensors are among them."""
    from monarch._groups.convening import ensure_world

    return bool(ensure_world().apart)


def fail_late(value: torch.Tensor) -> torch.Tensor:
    """Fail on rank 2, once the others have gone on."""
    if current_node().rank == 2:
        time.sleep(0.3)
        raise ValueError("of a test")
    return value.clone()


def test_value_for_a_new_slice_outlives_a_failure_elsewhere(mesh: Any) -> None:
    fails = monarch.remote(fail_late, propagate=lambda value: value.clone())
    with mesh.activate():
        lost = fails(torch.ones(2))
    # Rank 0 waits in the making of its groups for rank 2, which has failed.
    sharded = monarch.distribute(torch.ones(4), mesh.slice(mp=0), ["dp"])
    assert sharded.sum().item() == 4
    with pytest.raises(TensorError, match="of a test"):
        monarch.inspect(lost)


def spoil_next_generation() -> None:
    """Break the next process groups, and spoil those after them on rank 2 while they are formed."""
    from monarch._tensors.collectives import world

    usual = world.meet

    def meets(*args: Any) -> list[str]:
        world.meet = usual
        if current_node().rank == 2:
            renewing.give_up_attempt(0, "of a test")
        return usual(*args)

    world.meet = meets
    break_groups()


def form_groups() -> str:
    """Form the process groups; return why they broke meanwhile."""
    from monarch._groups.convening import ensure_world

    try:
        ensure_world(30.0)
    except GroupError as error:
        return str(error)
    return ""


def test_ranks_that_form_a_spoiled_generation_are_freed(mesh: Any) -> None:
    x = monarch.distribute(torch.arange(8.0), mesh, ["dp"])
    assert x.sum().item() == 28
    mesh.execute(spoil_next_generation)
    # All form it in the background. The others would wait there for a minute, since nothing waits for it on rank 2.
    assert mesh.slice(dp=0, mp=0).execute(form_groups).values()[0] in ("of a test", "")
    assert x.sum().item() == 28


def give_up_once(value: torch.Tensor, path: str, rank: int) -> torch.Tensor:
    """Give up the groups with which ops run, as if they had not been made on a rank."""
    if current_node().rank == rank and not os.path.exists(path):
        Path(path).touch()
        time.sleep(0.3)
        renewing.give_up_attempt(renewing.attempts.made[0], "of a test")
    return value.clone()


@pytest.mark.parametrize("is_new", [False, True], ids=["collective", "slice"])
def test_rank_in_groups_that_another_gave_up_is_freed(mesh: Any, tmp_path: Path, is_new: bool) -> None:
    with pytest.raises(TensorError, match="embedding failed"):
        looked_up(mesh, 99).sum().item()
    # No other test here uses the second one.
    part = mesh.slice(mp=int(is_new))
    if not is_new:
        assert monarch.ones(4, mesh=part, spec=["dp"]).sum().item() == 4
    gives_up = monarch.remote(give_up_once, propagate=lambda value, path, rank: value.clone())
    with mesh.activate():
        kept = gives_up(torch.ones(2), str(tmp_path / "given up"), 2 + is_new)
    sharded = monarch.distribute(torch.ones(4), part, ["dp"])
    assert sharded.sum().item() == 4
    assert torch.equal(monarch.inspect(kept), torch.ones(2))


def test_groups_of_tensors_are_made_when_all_ranks_have_halted(mesh: Any) -> None:
    """A rank that goes on with them would wait for others that have halted, and never come."""
    x = monarch.distribute(torch.arange(8.0), mesh, ["dp"])
    assert x.sum().item() == 28
    mesh.execute(break_groups)
    assert mesh.execute(has_groups_of_tensors).values() == [False] * 4
    assert x.sum().item() == 28


def test_healing_goes_on_though_groups_break_while_they_are_made(leaks: Any) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    pids = mesh.execute(os.getpid).values()
    whole = monarch.distribute(torch.arange(6.0), mesh)
    assert whole.sum().item() == 15
    mesh.slice(dp=0).execute(break_next_groups)
    os.kill(pids[1], signal.SIGKILL)
    # The new rank has no groups from before, so it makes each of them with the others, or waits for them.
    monarch.heal_mesh(mesh)
    assert whole.sum().item() == 15
    mesh.stop().get(30)


def test_resilient_execution_of_the_seed(leaks: Any) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    killed: list[int] = []

    def batches() -> Any:
        for batch in range(4):
            if batch == 2:
                killed.append(mesh.execute(os.getpid).values()[1])
                os.kill(killed[0], signal.SIGKILL)
                wait_until(lambda: not os.path.exists(f"/proc/{killed[0]}"))
            yield batch

    results: list[Any] = []
    current = mesh
    for batch in batches():
        try:
            results.append(current.execute(lambda x: x * 2, batch).values())
        except DeviceMeshError:
            current = monarch.heal_mesh(current)
            results.append(current.execute(lambda x: x * 2, batch).values())
    assert killed and results == [[0, 0], [2, 2], [4, 4], [6, 6]]
    mesh.stop().get(30)


def test_handlers_of_signals_may_use_tensors(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, x = tensor_mesh_of(mesh).stream, monarch.ones(4, mesh=mesh)
    send = stream._send
    found: list[float] = []

    def look() -> None:
        found.append(x.sum().item())

    def handler(number: int, frame: Any) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(20)

    def interrupted() -> None:
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGUSR1)
        send()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(stream, "_send", interrupted)
        stream.flush()
        assert found == [4]
        # Also while another thread sends.
        monkeypatch.setattr(stream, "_send", send)
        with stream.held(10):
            thread = threading.Thread(target=look)
            thread.start()
            with pytest.raises(DeviceMeshError, match="another thread has been sending"):
                in_thread(lambda: stream.held(0.1).__enter__())
        thread.join(20)
        assert found == [4, 4]
    finally:
        signal.signal(signal.SIGUSR1, before)


def in_thread(run: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result(20)


def test_waits_for_ranks_are_bounded(leaks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    pids = mesh.execute(os.getpid).values()
    x = monarch.ones(4, mesh=mesh)
    assert x.sum().item() == 4
    monkeypatch.setattr(recovery, "_WAIT_S", 1.0)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            tensor_mesh_of(mesh).recovery.recover()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    monkeypatch.undo()
    tensor_mesh_of(mesh).recovery.recover()
    assert x.sum().item() == 4
    mesh.stop().get(30)


def test_dropped_recording_leaves_the_calls_that_were_not_sent(mesh: Any) -> None:
    known, x = tensor_mesh_of(mesh), monarch.ones(4, mesh=mesh)
    step = monarch.compile(lambda x: x + 1)
    assert step(x).sum().item() == 8
    stream, recording = known.stream, step._recorded()
    template, result = recording._template, known.make(x.monarch_layout)
    with stream.held(10):
        inputs, outputs = tuple(recording.inputs), (result.monarch_ref.number,)
        stream.issue(template, inputs, (), outputs, 0)
        # As after healing, when new ranks know no templates.
        stream.forget_ranks()
        del step, recording
        gc.collect()
        assert template in stream.templates
    assert result.sum().item() == 8
    assert template not in stream.templates
