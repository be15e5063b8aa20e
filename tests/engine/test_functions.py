"""Functions on the ranks run once on each, in order with the ops, also after an op that has failed on some ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import monarch
from leaks import wait_until
from monarch._actors.endpoint import methods_of
from monarch._engine.meshes.tensor_mesh import TensorMeshes, tensor_mesh_of
from monarch._engine.rank.executing.executor import TensorExecutor
from monarch._engine.rank.operations.moving import Mover
from monarch._meshes.host_mesh import this_host
from monarch._node.current import current_node
from monarch.distributed import Mesh
from monarch.exceptions import ActorError, DeviceMeshError, TensorError

TABLE = torch.arange(8.0)[:, None].expand(8, 4).contiguous()


def fail_on_ranks_2_and_3(mesh: Any) -> Any:
    indices = torch.tensor([0, 1, 2, 99])
    return F.embedding(monarch.distribute(indices, mesh, ["dp"]), monarch.distribute(TABLE, mesh, None))


def note(folder: str, value: Any = None) -> int:
    rank = int(os.environ["RANK"])
    with open(f"{folder}/{rank}", "a") as file:
        file.write(f"{'' if value is None else value.tolist()}x")
    return rank


def note_and_raise(folder: str) -> None:
    if note(folder) == 3:
        raise ValueError("no luck")


def noted(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir()}


def run_call(mesh: Any, folder: str) -> Any:
    return monarch.remote(note).call(folder).get(60).values()


def run_stream(mesh: Any, folder: str) -> Any:
    return [each.get(60) for each in monarch.remote(note).stream(folder)]


def run_execute(mesh: Any, folder: str) -> Any:
    return mesh.execute(note, folder).values()


ALL = {str(rank): "x" for rank in range(4)}


@pytest.mark.parametrize("run", [run_call, run_stream, run_execute])
def test_function_runs_once_on_each_rank_after_a_failed_op(
    mesh: Any, tmp_path: Path, run: Callable[[Any, str], Any]
) -> None:
    lost = fail_on_ranks_2_and_3(mesh)
    with mesh.activate():
        assert run(mesh, str(tmp_path)) == [0, 1, 2, 3]
    assert noted(tmp_path) == ALL
    with pytest.raises(TensorError, match="embedding failed"):
        lost.sum().item()


def test_broadcast_after_a_failed_op_runs_in_order_on_all_ranks(mesh: Any, tmp_path: Path) -> None:
    with mesh.activate():
        x = torch.ones(1)
    fail_on_ranks_2_and_3(mesh)
    with mesh.activate():
        monarch.remote(note).broadcast(str(tmp_path), x)
    # Later ops wait for it on each rank.
    x.add_(1)
    assert monarch.inspect(x, dp=1, mp=1).item() == 2
    assert wait_until(lambda: noted(tmp_path) == dict.fromkeys(ALL, "[1.0]x")), noted(tmp_path)


def unreported() -> list[str]:
    found = current_node().part(TensorMeshes).take_unreported()
    return [each.failure.op for each in found if each.failure.text == "no luck" and each.failure.ranks == (3,)]


@pytest.mark.parametrize("is_after_failure", [False, True])
def test_errors_of_broadcasts_are_kept_for_the_end_of_the_cell(
    mesh: Any, tmp_path: Path, is_after_failure: bool
) -> None:
    current_node().part(TensorMeshes).take_unreported()
    told: list[str] = []
    if is_after_failure:
        fail_on_ranks_2_and_3(mesh)
    with mesh.activate():
        monarch.remote(note_and_raise).broadcast(str(tmp_path))
    assert wait_until(lambda: bool(told.extend(unreported()) or told)), noted(tmp_path)
    assert told == ["the function note_and_raise"]
    assert noted(tmp_path) == ALL
    assert monarch.ones(4, mesh=mesh, spec=["dp"]).sum().item() == 4
    assert unreported() == []


def test_error_of_a_kept_function_is_raised_once(mesh: Any, tmp_path: Path) -> None:
    fail_on_ranks_2_and_3(mesh)
    current_node().part(TensorMeshes).take_unreported()
    with mesh.activate(), pytest.raises(ActorError, match="no luck"):
        monarch.remote(note_and_raise).call(str(tmp_path)).get(60)
    assert unreported() == []
    assert noted(tmp_path) == ALL


def test_results_of_kept_functions_are_forgotten_on_ranks(mesh: Any, tmp_path: Path) -> None:
    fail_on_ranks_2_and_3(mesh)
    with mesh.activate():
        future = monarch.remote(note).call(str(tmp_path))
        del future
    assert monarch.ones(4, mesh=mesh, spec=["dp"]).sum().item() == 4
    executors = tensor_mesh_of(mesh).actors

    def held() -> list[int]:
        monarch.ones(4, mesh=mesh, spec=["dp"]).sum().item()
        halted = executors.account.call().get(60).values()
        return [number for account in halted for number in account.held if number < 0]

    assert wait_until(lambda: held() == []), held()


def looks_of(mesh: Any, other: Any) -> dict[str, Callable[[], Any]]:
    x = monarch.zeros(3, mesh=mesh, spec=["dp"])
    moved = monarch.zeros(3, mesh=other, spec=["dp"])

    def inspect() -> Any:
        with mesh.activate():
            return monarch.inspect(torch.ones(1))

    return {
        "full_tensor": x.full_tensor,
        "distribute": lambda: monarch.distribute(torch.zeros(4), mesh, ["dp"]),
        "from_local": lambda: monarch.from_local(torch.zeros, mesh, ["dp"], (2,)),
        "execute": lambda: mesh.execute(os.getpid),
        "inspect": inspect,
        "from": lambda: x.to_mesh(other).full_tensor(),
        "to": lambda: moved.to_mesh(mesh).full_tensor(),
    }


@pytest.mark.parametrize("end", ["killed", "stopped"])
@pytest.mark.usefixtures("mesh")
def test_errors_of_tensors_name_the_mesh_of_the_program(end: str) -> None:
    mesh = Mesh(procs=this_host().spawn_procs({"dp": 2}, name="trainer"))
    other = Mesh(procs=this_host().spawn_procs({"dp": 2}, name="other"))
    looks = looks_of(mesh, other)
    pids = mesh.execute(os.getpid).values()
    if end == "killed":
        os.kill(pids[1], signal.SIGKILL)
    else:
        mesh.stop().get(30)
    for name, look in looks.items():
        with pytest.raises(DeviceMeshError) as raised:
            look()
        text = str(raised.value)
        assert "trainer" in text, (name, text)
        assert not re.search(r"tensors\b[.\[]|of tensors |movers|put_shard|run\(\)", text), (name, text)
    looks.clear()
    for each in (mesh, other):
        each.stop().get(30)


def summed() -> int:
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total.item())


def test_function_cut_by_the_stop_of_another_rank_runs_again(mesh: Any) -> None:
    for _ in range(3):
        lost = fail_on_ranks_2_and_3(mesh)
        # Ranks 0 and 1 wait in it for the others, which have stopped at the op.
        assert mesh.execute(summed).values() == [4, 4, 4, 4]
        with pytest.raises(TensorError, match="embedding failed"):
            lost.sum().item()


def test_all_calls_of_executors_and_movers_have_titles() -> None:
    for cls in (TensorExecutor, Mover):
        assert set(methods_of(cls)) == set(cls.monarch_titles) - {"__init__"}


@pytest.mark.usefixtures("mesh")
def test_function_waiting_on_some_ranks_is_cancelled_by_a_death(tmp_path: Path) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    pids = mesh.execute(os.getpid).values()
    indices = monarch.distribute(torch.tensor([0, 99]), mesh, ["dp"])
    F.embedding(indices, monarch.distribute(TABLE, mesh, None))
    with mesh.activate():
        future = monarch.remote(note).call(str(tmp_path))
    # Rank 1 keeps it until the program looks.
    assert wait_until(lambda: "0" in noted(tmp_path))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(DeviceMeshError):
        future.get(60)
    monarch.heal_mesh(mesh)
    assert mesh.execute(note, str(tmp_path)).values() == [0, 1]
    assert monarch.ones(2, mesh=mesh, spec=["dp"]).sum().item() == 2
    mesh.stop().get(30)
