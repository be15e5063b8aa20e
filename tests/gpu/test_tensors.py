"""Distributed tensors whose ranks compute on GPUs: training, attention, recorded steps, memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from leaks import Kit
from monarch._procs.os.gpus import has_touched_gpus
from monarch.distributed import Mesh
from monarch.exceptions import TensorError

WIDTH, HEADS, LENGTH = 64, 4, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).reshape(batch, length, width))


@pytest.fixture(scope="module")
def shared_mesh() -> Iterator[Any]:
    made = Mesh()
    assert made.procs.initialized.get(300)
    assert made.execute(os.getpid).values()
    # The first op makes the groups.
    assert monarch.ones(2, mesh=made).sum().item() == 2
    yield made
    made.stop().get(30)


@pytest.fixture
def mesh(shared_mesh: Any, leaks: Any) -> Iterator[Any]:
    """The mesh, for a program that computes nothing itself."""
    touched = has_touched_gpus()
    yield shared_mesh
    assert has_touched_gpus() == touched


def losses(model: Any, optimizer: Any, x: Any, steps: int) -> list[float]:
    found: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_mesh_without_a_shape_takes_the_gpus(mesh: Any) -> None:
    assert mesh.size() == torch.cuda.device_count()
    assert "device=cuda" in repr(monarch.ones(2, mesh=mesh))


@pytest.mark.parametrize("fused", [False, True])
def test_training_has_the_losses_of_the_cpu(mesh: Any, fused: bool) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(Block(), Block())
    model = monarch.module_to_mesh(copy.deepcopy(alone), mesh, plan="shard")
    x = torch.randn(8, LENGTH, WIDTH)
    expected = losses(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3), x, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    assert losses(model, optimizer, monarch.distribute(x, mesh, [mesh.mesh_dim_names[0], None, None]), 10) == (
        pytest.approx(expected, rel=1e-4)
    )


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_recorded_steps_have_the_losses_of_the_loop(mesh: Any, backend: str, leaks: Kit) -> None:
    torch.manual_seed(0)
    plain = Block()
    model = monarch.module_to_mesh(copy.deepcopy(plain), mesh)
    other = monarch.module_to_mesh(plain, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = monarch.distribute(torch.randn(8, LENGTH, WIDTH), mesh)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    recorded = monarch.compile(step, backend=backend)
    found = [recorded(x).item() for _ in range(5)]
    expected = losses(other, torch.optim.SGD(other.parameters(), lr=0.1), x, 5)
    assert found == pytest.approx(expected, rel=1e-3)
    # Processes of inductor compile for the ranks until these end.
    leaks.rebase()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head", [7, 16, 64])
@pytest.mark.parametrize("masked", ["", "causal", "mask"])
def test_attention_agrees_with_that_of_the_program(mesh: Any, dtype: torch.dtype, head: int, masked: str) -> None:
    torch.manual_seed(0)
    tensors: list[Any] = [torch.randn(2, 3, 40, head, dtype=dtype, requires_grad=True) for _ in range(3)]
    there: list[Any] = [monarch.distribute(each.detach(), mesh).requires_grad_() for each in tensors]
    mask = torch.randn(40, 40, dtype=dtype) if masked == "mask" else None
    causal = masked == "causal"
    attention: Any = F.scaled_dot_product_attention
    ours = attention(*there, None if mask is None else monarch.distribute(mask, mesh), is_causal=causal)
    alone = attention(*tensors, mask, is_causal=causal)
    ours.square().sum().backward()
    alone.square().sum().backward()
    near = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float64: 1e-9}[dtype]
    pairs = [(ours, alone), *((one.grad, other.grad) for one, other in zip(there, tensors, strict=True))]
    for one, other in pairs:
        assert other is not None
        assert torch.allclose(one.detach().full_tensor(), other.detach(), rtol=near, atol=20 * near)


def test_lstm_has_the_values_of_the_program(mesh: Any) -> None:
    torch.manual_seed(0)
    alone = nn.LSTM(5, 7, batch_first=True)
    there = monarch.module_to_mesh(copy.deepcopy(alone), mesh)
    x = torch.randn(4, 6, 5)
    ours, _ = there(monarch.distribute(x, mesh))
    ours.square().sum().backward()
    assert torch.allclose(ours.detach().full_tensor(), alone(x)[0], atol=1e-4)


def test_autocast_computes_in_bfloat16(mesh: Any) -> None:
    model = monarch.module_to_mesh(Block(), mesh)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.qkv(monarch.ones(2, LENGTH, WIDTH, mesh=mesh))
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert model.qkv.weight.grad.dtype == torch.float32


def test_gradients_are_scaled(mesh: Any) -> None:
    model = monarch.module_to_mesh(nn.Linear(4, 4), mesh)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    before = model.weight.detach().full_tensor()
    scaler.scale(model(monarch.ones(2, 4, mesh=mesh)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(model.weight.detach().full_tensor(), before - 0.2)


def test_out_of_memory_names_the_line_and_keeps_the_rest(mesh: Any) -> None:
    small, big = monarch.ones(2, mesh=mesh), monarch.zeros(1 << 42, mesh=mesh)
    with pytest.raises(TensorError, match="CUDA out of memory"):
        big.sum().item()
    assert small.sum().item() == 2


def test_rank_local_tensors_and_streams(mesh: Any) -> None:
    with mesh.activate():
        a = torch.arange(5.0, device="cuda").cuda()
        side = monarch.Stream("side")
        with side.activate():
            doubled, loan = torch.ones(5) * 2, None
        back, loan = monarch.get_active_stream().borrow(doubled)
        total = a * back
        loan.drop()
        assert monarch.inspect(total, **dict.fromkeys(mesh.mesh_dim_names, 0)).tolist() == [0, 2, 4, 6, 8]


def test_copies_between_meshes_of_gpus(mesh: Any) -> None:
    axes = {name: torch.cuda.device_count() for name in mesh.mesh_dim_names}
    other = Mesh(shape=tuple(axes.values()), mesh_dim_names=tuple(axes))
    try:
        x = monarch.arange(4, dtype=torch.float32, mesh=mesh).requires_grad_()
        (x.to_mesh(other) * 3).sum().backward()
        assert x.grad is not None and x.grad.full_tensor().tolist() == [3.0] * 4
    finally:
        other.stop().get(30)


def train(mesh: Any, steps: int, width: int, rows: int) -> None:
    model = monarch.module_to_mesh(nn.Sequential(*[nn.Linear(width, width) for _ in range(4)], nn.GELU()), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses(model, optimizer, monarch.ones(rows, width, mesh=mesh, spec=["dp", None]), steps)


def reset_peak() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak() -> int:
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("size", [(1024, 8192), (2048, 2048), (4096, 4096)])
def test_the_forecast_of_memory_agrees_with_a_gpu(size: tuple[int, int]) -> None:
    with monarch.simulate(hosts=1, gpus=1, device="h100") as simulation:
        train(Mesh(shape=(1,), mesh_dim_names=("dp",)), 3, *size)
    mesh = Mesh(shape=(1,), mesh_dim_names=("dp",))
    try:
        train(mesh, 2, 64, 64)
        before = mesh.execute(reset_peak).values()[0]
        train(mesh, 3, *size)
        found = mesh.execute(peak).values()[0] - before
    finally:
        mesh.stop().get(30)
    assert simulation.forecast().peak == pytest.approx(found, rel=0.1)
