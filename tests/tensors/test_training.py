"""Training loops as people write them in torch, on the process groups and device meshes of the ranks' own mesh."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kernels import Notebook
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import device_mesh, group
from monarch.exceptions import SupervisionError
from tensors.training import STEPS, assert_golden, assert_same, batch, golden, make_net, make_optimizer, train

GUARD = 60
"""Seconds after which something counts as hanging."""


class Trainer(Actor):
    """Trains the network on its rank's part of the batches, in several ways."""

    def __init__(self) -> None:
        self.rank = current_rank().rank

    def _train(self, model: Any, part: int, parts: int, steps: int = STEPS) -> list[float]:
        self.model: Any = model
        return train(model, make_optimizer(model), range(steps), part, parts)

    @endpoint
    def ddp(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = self._train(DistributedDataParallel(make_net(), process_group=group()), self.rank, 2)
        return losses, self.model.module.state_dict()

    @endpoint
    def ddp_over(self, given: Any) -> list[float]:
        assert isinstance(given, dist.ProcessGroup) and given is group("dp") and given.size() == 2
        model = DistributedDataParallel(make_net(), process_group=given)
        return self._train(model, current_rank()["dp"], 2)

    @endpoint
    def ddp_by_itself(self) -> list[float]:
        dist.init_process_group("gloo", rank=self.rank, world_size=2)
        losses = self._train(DistributedDataParallel(make_net()), self.rank, 2)
        # Otherwise it keeps the group alive.
        del self.model
        dist.destroy_process_group()
        return losses

    @endpoint
    def compiled(self, backend: str, ddp_first: bool, folder: str) -> list[float]:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        model: Any
        if ddp_first:
            model = torch.compile(DistributedDataParallel(make_net(), process_group=group()), backend=backend)
        else:
            model = DistributedDataParallel(torch.compile(make_net(), backend=backend), process_group=group())
        return self._train(model, self.rank, 2, 2)

    @endpoint
    def fsdp(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        from torch.distributed.fsdp import fully_shard

        model: Any = make_net()
        mesh = device_mesh()
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        losses = self._train(fully_shard(model, mesh=mesh), self.rank, 2)
        assert model.first.weight.to_local().shape == (8, 6)
        return losses, {name: value.full_tensor() for name, value in model.state_dict().items()}

    @endpoint
    def tensor_parallel(self) -> torch.Tensor:
        model = _split_layers(make_net(), device_mesh()["tp"])
        assert model.first.weight.to_local().shape == (8, 6) and model.second.weight.to_local().shape == (4, 8)
        # Of its own memory, since what the model returns may not have been summed yet.
        return model(batch(0)[0]).clone()

    @endpoint
    def two_axes(self) -> list[float]:
        from torch.distributed.fsdp import fully_shard

        mesh = device_mesh()
        assert mesh.mesh_dim_names == ("dp", "tp") and mesh.shape == (2, 2)
        model: Any = fully_shard(_split_layers(make_net(), mesh["tp"]), mesh=mesh["dp"])
        losses = self._train(model, current_rank()["dp"], 2)
        assert model.first.weight.to_local().shape == (4, 6)
        return losses

    @endpoint
    def distributed_tensors(self) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        torch.manual_seed(0)
        left, right, mesh = torch.randn(6, 4), torch.randn(4, 2), device_mesh()
        mine = slice(3 * self.rank, 3 * self.rank + 3)
        rows: Any = distribute_tensor(left, mesh, [Shard(0)])
        assert torch.equal(rows.to_local(), left[mine]) and torch.equal(rows.full_tensor(), left)
        product: Any = rows @ distribute_tensor(right, mesh, [Replicate()])
        torch.testing.assert_close(product.to_local(), (left @ right)[mine])
        torch.testing.assert_close(product.full_tensor(), left @ right)
        columns = product.redistribute(mesh, [Shard(1)])
        torch.testing.assert_close(columns.to_local(), (left @ right)[:, self.rank : self.rank + 1])
        # Along the axis of the sums, so each rank has a part of every sum.
        parts: Any = rows.redistribute(mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
        assert parts.placements[0].is_partial()
        torch.testing.assert_close(parts.redistribute(mesh, [Replicate()]).to_local(), left @ right)

    @endpoint
    def pipeline(self) -> tuple[torch.Tensor | None, list[float]]:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        whole, here = make_net(), group()
        part = nn.Sequential(whole.first, nn.Tanh()) if self.rank == 0 else whole.second
        stage = PipelineStage(part, self.rank, 2, torch.device("cpu"), group=here)
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizer = make_optimizer(part)
        out, means = None, list[float]()
        for step in range(2):
            rows, targets = batch(step)
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if self.rank == 0:
                schedule.step(rows)
            else:
                out = schedule.step(target=targets, losses=losses)
                means.append(torch.stack(losses).mean().item())
            optimizer.step()
        return out, means

    @endpoint
    def dies(self) -> None:
        model = make_net()
        if self.rank == 1:
            # Of the last layer, whose gradients come first: the other rank waits for all of them.
            model.second.bias.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        self._train(DistributedDataParallel(model, process_group=group()), self.rank, 2)

    @endpoint
    def alone(self) -> list[float]:
        return self._train(make_net(), 0, 1)


def _split_layers(model: nn.Module, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def run(mesh: Any, what: str, *args: Any) -> list[Any]:
    """Return the results of an endpoint of Trainer on each rank of a mesh."""
    return list(getattr(mesh.spawn("trainers", Trainer), what).call(*args).get(timeout=GUARD).values())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def test_ddp_matches_one_process(procs: Any) -> None:
    (losses, state), (others, other) = run(procs(2), "ddp")
    assert_golden([losses, others])
    assert_same(state, golden()[1])
    assert all(torch.equal(value, other[name]) for name, value in state.items())


def test_ddp_works_over_given_group(procs: Any) -> None:
    mesh = procs({"dp": 2, "tp": 2})
    losses = run(mesh, "ddp_over", mesh.group("dp"))
    assert losses[0] == losses[1] != losses[2]
    assert_golden(losses)


def test_ddp_works_in_own_group_of_actor(procs: Any) -> None:
    mesh = procs(2, env={"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())})
    assert_golden(run(mesh, "ddp_by_itself"))


def test_fsdp_matches_one_process(procs: Any) -> None:
    (losses, state), (others, other) = run(procs(2), "fsdp")
    assert_golden([losses, others])
    assert_same(state, golden()[1])
    assert_same(other, state)


def test_split_layers_match_whole_layers(procs: Any) -> None:
    expected = make_net()(batch(0)[0])
    for out in run(procs({"tp": 2}), "tensor_parallel"):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)


def test_distributed_tensors_match_plain_ones(procs: Any) -> None:
    run(procs(2), "distributed_tensors")


@pytest.mark.slow
def test_fsdp_with_split_layers_on_two_axes(procs: Any) -> None:
    losses = run(procs({"dp": 2, "tp": 2}), "two_axes")
    assert losses[0] == losses[1] != losses[2]
    assert_golden(losses)


def test_pipeline_matches_whole_model(procs: Any) -> None:
    (nothing, none), (out, losses) = run(procs(2), "pipeline")
    assert nothing is None and none == []
    assert_golden([losses])
    model = make_net()
    train(model, make_optimizer(model), [0])
    torch.testing.assert_close(out, model(batch(1)[0]).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_compiled_models_match_eager_ones(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2)
    for ddp_first in (True, False):
        assert_golden(run(mesh, "compiled", "aot_eager", ddp_first, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_natively_compiled_models_match_eager_ones(procs: Any, tmp_path: Path) -> None:
    assert_golden(run(procs(2), "compiled", "inductor", True, str(tmp_path)))
    assert list(tmp_path.rglob("*.cpp")), "it was compiled"


def test_death_in_step_ends_step_of_other_ranks(procs: Any) -> None:
    trainers = procs(2).spawn("trainers", Trainer)
    with pytest.raises(SupervisionError) as caught:
        trainers.dies.call().get(timeout=GUARD)
    assert caught.value.ranks == (1,)
    assert trainers.slice(gpus=0).alone.call_one().get(timeout=GUARD) == golden()[0]


@pytest.fixture(scope="module")
def notebook(spec: str) -> Iterator[Notebook]:
    """A notebook with a mesh of two ranks."""
    book = Notebook()
    try:
        book.run("%mesh up --procs 2").ok()
        yield book
    finally:
        book.close()


@pytest.mark.slow
def test_ddp_works_in_cells(notebook: Notebook) -> None:
    folder = str(Path(__file__).parent)
    notebook.mesh(
        f"import sys\nsys.path.insert(0, {folder!r})\n"
        "from training import STEPS, make_net, make_optimizer, train\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "assert mesh.device_mesh().mesh_dim_names == ('procs',) and mesh.group().size() == world_size\n"
        "model = DistributedDataParallel(make_net(), process_group=mesh.group())\n"
        "optimizer = make_optimizer(model)\n"
        "losses = train(model, optimizer, range(2), rank, world_size)"
    ).ok()
    cell = notebook.mesh(
        "losses += train(model, optimizer, range(2, STEPS), rank, world_size)\n"
        "mean = torch.tensor(losses, dtype=torch.double) / world_size\n"
        "dist.all_reduce(mean)\n"
        "mean.tolist()",
        "--out means",
    ).ok()
    assert "[ranks 0-1]" in cell.shown
    means = ast.literal_eval(notebook.run("print(list(means.values()))").ok().stream())
    assert means[0] == means[1]
    assert_golden([means[0]])
