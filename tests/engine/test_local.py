"""Rank-local tensors: ops of torch in ``with mesh.activate()`` run on each rank, on a plain tensor of its own."""

from __future__ import annotations

import copy
import os
import signal
import threading
from typing import Any

import pytest
import torch as torch_
import torch.nn.functional as F
from torch import nn

import monarch
from leaks import wait_until
from monarch._engine.meshes.tensor_mesh import tensor_mesh_of
from monarch.distributed import Mesh
from monarch.exceptions import (
    ArgumentError,
    AxisError,
    DeviceMeshError,
    MeshOpError,
    PointError,
    ShapeError,
    TensorError,
)

torch: Any = torch_


def values(mesh: Any, tensor: Any) -> list[Any]:
    """Return the value of each rank, in the order of ranks."""
    return [
        monarch.inspect(tensor, dp=dp, mp=mp).tolist() for dp in range(mesh.shape[0]) for mp in range(mesh.shape[1])
    ]


def numbered(mesh: Any) -> Any:
    """The number of each rank."""
    return mesh.rank_tensor("dp") * 2 + mesh.rank_tensor("mp")


def test_ops_in_a_block_make_a_tensor_on_each_rank(mesh: Any) -> None:
    with mesh.activate():
        assert monarch.get_active_mesh() is mesh
        x = torch.ones(3, 4)
        y = (x + numbered(mesh)).sum(dim=1)
        constant = torch.tensor([1.0, 2.0])
    assert isinstance(y, monarch.RankTensor) and y.shape == (3,) and y.mesh is mesh
    assert "RankTensor(shape=(3,), dtype=float32" in repr(y)
    assert values(mesh, y) == [[4.0 + 4 * rank] * 3 for rank in range(4)]
    assert values(mesh, constant) == [[1.0, 2.0]] * 4
    # Ops work outside of the block too, and new tensors are the program's there.
    assert values(mesh, (y * 2)[0]) == [8.0, 16.0, 24.0, 32.0]
    assert type(torch.ones(2)) is torch.Tensor
    with pytest.raises(ArgumentError, match="no device mesh is active"):
        monarch.get_active_mesh()


def test_block_of_a_proc_mesh_and_a_slice(mesh: Any) -> None:
    with mesh.procs.activate():
        assert torch.zeros(2).mesh.size() == 4
    with mesh.slice(dp=1).activate() as part:
        x = torch.ones(2) * part.rank_tensor("mp")
    assert monarch.inspect(x, mp=1).tolist() == [1, 1]
    with pytest.raises(AxisError, match="no axis 'dp'; it has mp"):
        monarch.inspect(x, dp=1, mp=0)


def test_no_mesh_computes_in_the_program(mesh: Any) -> None:
    with mesh.activate():
        with monarch.no_mesh.activate():
            assert type(torch.ones(2) + 1) is torch.Tensor
            with pytest.raises(ArgumentError, match="no device mesh"):
                monarch.get_active_mesh()
        assert isinstance(torch.ones(2), monarch.RankTensor)


def test_training_in_the_block_equals_one_process(mesh: Any) -> None:
    torch.manual_seed(7)
    expected = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 1))
    data = torch.randn(4, 6, 4)
    own = monarch.distribute(data.flatten(0, 1), mesh, [("dp", "mp"), None]).to_local()
    with mesh.activate():
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 1))
        model.load_state_dict(expected.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, expected)]
    for _ in range(3):
        model(own).square().mean().backward()
        for parameter in model.parameters():
            monarch.reduce_(parameter.grad, reduction="avg")
        expected(data.flatten(0, 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        for mp in range(2):
            torch.testing.assert_close(monarch.inspect(ours, dp=1, mp=mp), theirs.detach(), atol=1e-5, rtol=1e-5)


def test_random_numbers_come_from_the_programs_seed(mesh: Any) -> None:
    def drawn() -> Any:
        torch.manual_seed(3)
        with mesh.activate():
            return torch.randn(4) + torch.rand(4).uniform_(1, 2)

    first, second = drawn(), drawn()
    found = values(mesh, first)
    assert found == values(mesh, second) and found == [found[0]] * 4


def test_views_share_memory_on_the_ranks(mesh: Any) -> None:
    with mesh.activate():
        x = torch.zeros(2, 3)
    x[0] += 1
    row = x[1]
    row.fill_(5)
    x.unsqueeze_(0)
    assert x.shape == (1, 2, 3) and row.shape == (3,)
    assert values(mesh, x) == [[[[1, 1, 1], [5, 5, 5]]]] * 4
    assert copy.deepcopy(x).shape == (1, 2, 3)


def test_item_needs_the_same_number_on_all_ranks(mesh: Any) -> None:
    with mesh.activate():
        same = torch.full((), 2.5)
    assert same.item() == 2.5 and bool(same > 2) and f"{same:.1f}" == "2.5"
    with pytest.raises(MeshOpError, match=r"different values \(0, 1, 2, 3\); reduce them first"):
        numbered(mesh).item()
    with pytest.raises(MeshOpError, match=r"choose one, as in monarch.inspect\(tensor, gpus=0\).tolist\(\)"):
        same.tolist()


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum", 2), ("avg", 1), ("product", 0), ("min", 0), ("max", 2), ("stack", [0, 2])],
)
def test_reduce_along_an_axis(mesh: Any, reduction: str, expected: Any) -> None:
    found = monarch.reduce({"x": numbered(mesh)}, "dp", reduction)["x"]
    assert monarch.inspect(found, dp=1, mp=0).tolist() == expected


def test_reduce_over_all_axes_and_in_place(mesh: Any) -> None:
    x = numbered(mesh)
    assert values(mesh, x.reduce()) == [6] * 4
    assert x.reduce_(("mp",), "max") is x
    assert values(mesh, x) == [1, 1, 3, 3]
    assert values(mesh, numbered(mesh).reduce("mp", "bor")) == [1, 1, 3, 3]


def test_reduce_with_scatter(mesh: Any) -> None:
    with mesh.activate():
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + numbered(mesh) * 10
    assert values(mesh, x.reduce("mp", scatter=True)) == [[12, 14], [16, 18], [52, 54], [56, 58]]
    exchanged = x.reduce("mp", "stack", scatter=True)
    assert values(mesh, exchanged)[:2] == [[[1, 2], [11, 12]], [[3, 4], [13, 14]]]


def test_wrong_arguments_of_reduce_raise_at_once(mesh: Any) -> None:
    with mesh.activate():
        x = torch.ones(3)
        learned = torch.ones(3, requires_grad=True)
    with pytest.raises(AxisError, match="no axis 'tp'; it has dp, mp"):
        x.reduce("tp")
    with pytest.raises(ArgumentError, match="expected one of sum, avg"):
        x.reduce("dp", "mean")
    with pytest.raises(ShapeError, match="must have size 2"):
        x.reduce("dp", scatter=True)
    with pytest.raises(ArgumentError, match="take one axis"):
        x.reduce(None, "stack")
    with pytest.raises(ArgumentError, match="distinct axes"):
        x.reduce(("dp", "dp"))
    with pytest.raises(MeshOpError, match="has no gradient"):
        learned.reduce("dp")
    with pytest.raises(ArgumentError, match="use reduce"):
        x.reduce_("dp", "stack")


def test_slice_mesh_and_split_keep_values(mesh: Any) -> None:
    x = numbered(mesh)
    part = x.slice_mesh(dp=1)
    part += 10
    assert monarch.inspect(part, mp=0).item() == 12
    # The slice shares memory with the whole, and its ops are in order with it.
    assert values(mesh, x) == [0, 1, 12, 13]
    assert mesh.flatten("all").split(all=("a", "b"), a=4).shape == (4, 1)
    with mesh.flatten("all").activate() as flat:
        assert monarch.inspect(flat.rank_tensor("all"), all=3).item() == 3


def test_fetch_shard_takes_trees_and_checks_coordinates(mesh: Any) -> None:
    x = numbered(mesh)
    future = monarch.fetch_shard({"a": [x, 5], "b": x + 1}, {"dp": 1}, mp=1)
    x += 100
    # The values are those of the call.
    assert future.get(30) == {"a": [torch.tensor(3), 5], "b": torch.tensor(4)}
    with pytest.raises(ValueError, match="Missing key 'mp' in shard map"):
        monarch.inspect(x, dp=1)
    with pytest.raises(KeyError, match="no axis 'tp'"):
        monarch.inspect(x, tp=1)
    with pytest.raises(PointError, match="from 0 to 1"):
        monarch.inspect(x, dp=2, mp=0)


def test_show_prints_the_tensor_of_a_rank(mesh: Any, capsys: Any) -> None:
    monarch.show(numbered(mesh), dp=1, mp=0)
    assert capsys.readouterr().out == "tensor(2)\n"


def test_both_views_convert_and_refuse_to_mix(mesh: Any) -> None:
    sharded = monarch.distribute(torch.arange(8.0).reshape(4, 2), mesh, ["dp", None]).requires_grad_()
    own = sharded.to_local()
    assert values(mesh, own)[2] == [[4, 5], [6, 7]]
    back = monarch.from_local(own * 2, mesh, ["dp", None])
    assert back.full_tensor().tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]
    back.sum().backward()
    assert sharded.grad.full_tensor().tolist() == [[2, 2]] * 4
    for mixed in (lambda: own + sharded, lambda: sharded + own, lambda: sharded.detach().copy_(own.detach())):
        with pytest.raises(MeshOpError, match=r"convert\s+the distributed tensor with\s+.to_local\(\)"):
            mixed()
    with pytest.raises(MeshOpError, match=r"convert it with monarch.from_local\(tensor, mesh, spec\)"):
        monarch.distribute(own.detach(), mesh, None)
    with pytest.raises(ArgumentError, match=r"use monarch\.inspect"):
        monarch.fetch(own)
    with pytest.raises(ArgumentError, match="recorded steps take distributed tensors"):
        monarch.compile(lambda x: x)(own)
    with pytest.raises(ShapeError, match="shards of different shapes"):
        monarch.distribute(torch.ones(3), mesh, ["dp"]).to_local()


def test_tensors_of_the_program_are_refused_except_numbers(mesh: Any) -> None:
    with mesh.activate():
        x = torch.ones(2)
        with monarch.no_mesh.activate():
            mine, number = torch.ones(2), torch.tensor(3.0)
        with pytest.raises(MeshOpError, match=r"shape \(2,\) with rank-local tensors; send it to them"):
            _ = x + mine
        assert values(mesh, x * number) == [[3, 3]] * 4
        # Ops on plain tensors only stay in it.
        assert type(mine + mine) is torch.Tensor


def test_wrong_shapes_raise_at_the_line(mesh: Any) -> None:
    with mesh.activate():
        with pytest.raises(RuntimeError, match="broadcast"):
            _ = torch.ones(2) + torch.ones(3)
        with pytest.raises(MeshOpError, match="depends on values, which differ"):
            torch.ones(2).nonzero()


def test_dropped_tensors_raise_and_leave_the_ranks(mesh: Any) -> None:
    with mesh.activate():
        x = torch.ones(2)
        later = x + 1
    live = tensor_mesh_of(mesh).stream.live
    number = x.monarch_ref.number
    x.drop()
    assert x.dropped and number not in live
    with pytest.raises(MeshOpError, match=r"already dropped, at File .*test_local.py"):
        _ = x + 1
    assert values(mesh, later) == [[2, 2]] * 4


def test_failure_names_the_line_and_others_keep_values(mesh: Any) -> None:
    with mesh.activate():
        table, other = torch.arange(4.0), torch.ones(2)
        rows = F.embedding(numbered(mesh)[None] * 3, table[:, None])
        shared = table[:2]
        shared += rows[0]
    for lost in (rows, rows.sum() + 1, shared, table):
        with pytest.raises(TensorError, match=r"aten::embedding failed on ranks 2-3 of mesh: IndexError") as raised:
            monarch.inspect(lost)
    assert "test_local.py" in str(raised.value) and "test_failure_names" in str(raised.value)
    assert values(mesh, other.reduce()) == [[4, 4]] * 4


def double(x: Any, *, by: float = 2.0) -> Any:
    return {"result": x * by, "nothing": None}


def test_remote_functions_make_tensors(mesh: Any) -> None:
    x = numbered(mesh)
    for how in (None, "cached", "inspect", "mocked", lambda x, by=2.0: {"result": x * 1.0, "nothing": None}):
        function = monarch.remote(double, propagate=how)
        for _ in range(2):
            found = function(x, by=3.0)
            assert found["nothing"] is None and values(mesh, found["result"] + 1) == [1, 4, 7, 10]
    assert values(mesh, monarch.remote("torch.neg")(x)) == [0, -1, -2, -3]


def test_remote_functions_return_other_values(mesh: Any) -> None:
    @monarch.remote
    def place(x: Any) -> tuple[int, str]:
        return int(x), type(x).__name__

    x = numbered(mesh)
    assert place.call(x).get(30).values() == [(rank, "Tensor") for rank in range(4)]
    assert sorted(each.get(30)[0] for each in place.stream(x)) == [0, 1, 2, 3]
    assert place.choose(x).get(30)[0] in range(4)
    assert place.call_one(x.slice_mesh(dp=1, mp=0)).get(30)[0] == 2
    assert monarch.call_on_shard_and_fetch(place, x, shard={"dp": 1, "mp": 1}).get(30)[0] == 3
    with mesh.activate():
        assert monarch.remote("os.getcwd").call().get(30).values() != []
    with pytest.raises(ArgumentError, match="must return tensors"):
        raise_cause(lambda: place(x))


def raise_cause(call: Any) -> None:
    """Raise the error of a rank as its kind says."""
    try:
        call()
    except TensorError as error:
        raise ArgumentError(str(error)) from None


def test_remote_function_that_raises_fails_its_results(mesh: Any) -> None:
    def picky(x: Any) -> Any:
        if x > 2:
            raise ValueError("too much")
        return x

    function = monarch.remote(picky, propagate=lambda x: x)
    x = numbered(mesh)
    failed, good = function(x), function(x * 0) + 1
    with pytest.raises(TensorError, match=r"the remote function picky failed on rank 3 of mesh: ValueError: too much"):
        monarch.inspect(failed)
    assert values(mesh, good) == [1] * 4
    wrong = monarch.remote(lambda x: x[None], propagate=lambda x: x)(x)
    with pytest.raises(TensorError, match=r"expected \[\(\(\), torch"):
        monarch.inspect(wrong)


def test_remote_checks_its_arguments(mesh: Any) -> None:
    with pytest.raises(ArgumentError, match="no device mesh is active"):
        monarch.remote(double)(1)
    with pytest.raises(ArgumentError, match="propagate"):
        monarch.remote(double, propagate="guess")
    with pytest.raises(ArgumentError, match="expected a function"):
        monarch.remote("neg")
    with mesh.activate():
        learned = torch.ones(2, requires_grad=True)
    with pytest.raises(MeshOpError, match="has no gradient"):
        monarch.remote(double)(learned)


def test_streams_lend_tensors(mesh: Any) -> None:
    side = monarch.Stream("side")
    with mesh.activate():
        x = torch.ones(2)
        with side.activate():
            assert monarch.get_active_stream() is side
            y = torch.ones(2)
    assert y.stream is side and x.stream is monarch.get_active_stream()
    with pytest.raises(MeshOpError, match="different streams"):
        _ = x + y
    lent, borrow = side.borrow(x)
    assert values(mesh, lent + y) == [[2, 2]] * 4
    with pytest.raises(MeshOpError, match="borrowed read-only"):
        lent.add_(1)
    borrow.drop()
    with pytest.raises(MeshOpError, match="the borrow of a tensor"):
        _ = lent + y
    mutable, borrow = side.borrow(x, mutable=True)
    with borrow:
        mutable.add_(y)
        with pytest.raises(MeshOpError, match="borrowed by another stream"):
            _ = x + 1
    assert values(mesh, x) == [[2, 2]] * 4


def test_gradients_of_functions_and_generators(mesh: Any) -> None:
    @monarch.grad_function
    def scaled(x: Any, y: Any) -> Any:
        return x * y, lambda grad: (grad * y * 10, None)

    with mesh.activate():
        x, y = torch.full((2,), 3.0, requires_grad=True), torch.full((2,), 4.0, requires_grad=True)
        unused = torch.ones(1, requires_grad=True)
    loss = (scaled(x, y) + y).sum()
    found = list(monarch.grad_generator(loss, [x, y, unused]))
    assert [values(mesh, each)[3] for each in found[:2]] == [[40, 40], [1, 1]] and found[2] is None


def test_freed_tensors_leave_the_ranks(mesh: Any) -> None:
    def held() -> list[int]:
        return monarch.remote(count_values).call(numbered(mesh)).get(30).values()

    before = held()
    with mesh.activate():
        kept = [torch.ones(3) for _ in range(20)]
    assert held() == [each + 20 for each in before]
    kept.clear()
    wait_until(lambda: held() == before, 20)


def count_values(_: Any) -> int:
    """How many tensors the executor of this rank has."""
    import gc

    from monarch._engine.rank.executing.executor import TensorExecutor

    return sum(len(each.values) for each in gc.get_objects() if isinstance(each, TensorExecutor))


def test_modules_and_losses_of_torch_run_in_the_block(mesh: Any) -> None:
    with mesh.activate():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        model.append(nn.Linear(36, 2))
        x = torch.randn(2, 3, 8, 8) * (numbered(mesh) + 1)
        loss = F.cross_entropy(model(x), torch.tensor([0, 1]))
        loss.backward()
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        encoder(torch.randn(2, 5, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0, error_if_nonfinite=False)
    assert len({monarch.inspect(loss, dp=dp, mp=0).item() for dp in range(2)}) == 2
    assert monarch.inspect(encoder.linear1.weight.grad).shape == (16, 8)


def test_data_of_the_program_stay_in_it(mesh: Any) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(8.0))
    with mesh.activate():
        batches = list(torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True))
        found = monarch.remote(lambda x: x + 1).call(numbered(mesh)).get(30).values()
    assert sorted(torch.cat([each[0] for each in batches]).tolist()) == list(range(8))
    assert [type(each) for each in found] == [torch.Tensor] * 4


def test_threads_use_meshes_on_their_own(mesh: Any) -> None:
    found: list[Any] = []

    def work() -> None:
        with mesh.activate():
            x = torch.zeros(2)
            for _ in range(100):
                x = x + 1
            found.append(values(mesh, x))

    with mesh.activate():
        other = threading.Thread(target=lambda: found.append(type(torch.ones(2))))
        other.start()
        other.join(30)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [torch.Tensor, *[[[100, 100]] * 4] * 4]


def test_death_of_a_rank_loses_its_tensors_and_healing_goes_on(leaks: Any) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("gpus",))
    with mesh.activate():
        x = torch.ones(2)
    os.kill(mesh.execute(os.getpid).values()[1], signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match="rank 1"):
        for _ in range(1000):
            monarch.inspect(x.reduce())
    assert monarch.heal_mesh(mesh) is mesh
    with pytest.raises(DeviceMeshError, match=r"only on rank 1 .* died"):
        monarch.inspect(x)
    with mesh.activate():
        assert monarch.inspect(torch.ones(2).reduce(), gpus=1).tolist() == [2, 2]
    mesh.stop().get(30)
