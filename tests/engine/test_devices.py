"""To the program, distributed tensors are on the CPU, also if the ranks have GPUs and the program has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch._engine.issuing.encoding import Input, Template
from monarch._engine.meshes.tensor_mesh import tensor_mesh_of
from monarch._engine.rank.devices import on_device as devices
from monarch.exceptions import MeshOpError


@pytest.fixture
def gpus(mesh: Any) -> Iterator[Any]:
    """The mesh as if its ranks had told that they compute on GPUs; they do so on CPUs."""
    target = tensor_mesh_of(mesh)
    target.kind = "cuda"
    yield mesh
    target.kind = "cpu"


def test_training_needs_no_gpu_in_the_program(gpus: Any) -> None:
    model = monarch.module_to_mesh(torch.nn.Linear(4, 4), gpus)
    x = monarch.ones(8, 4, mesh=gpus, spec=["dp", None])
    loss = model.to("cuda")(x.cuda()).square().mean()
    loss.backward()
    assert model.weight.grad is not None and model.weight.grad.shape == (4, 4)
    assert loss.item() > 0
    torch.optim.AdamW(model.parameters(), fused=True).step()


def test_repr_tells_the_device_of_the_ranks(gpus: Any) -> None:
    assert "spec=[None], device=cuda" in repr(monarch.ones(3, mesh=gpus))
    with gpus.activate():
        assert "dtype=float32, device=cuda" in repr(torch.ones(3))


def test_devices_of_the_ranks_are_asked_for_as_anywhere(gpus: Any) -> None:
    x = monarch.ones(3, mesh=gpus)
    assert x.to("cuda:1", torch.float64).dtype == torch.float64
    assert x.to(device=torch.device("cuda")).sum().item() == 3
    with gpus.activate():
        made = torch.arange(3, device="cuda") + torch.ones(3).cuda()
    assert monarch.inspect(made, dp=0, mp=0).tolist() == [1, 2, 3]


def test_other_blocks_keep_the_devices_of_the_program(gpus: Any) -> None:
    with (
        gpus.activate(),
        monarch.no_mesh.activate(),
        pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"),
    ):
        torch.ones(1, device="cuda")


def test_cuda_on_a_mesh_of_cpus_is_refused(mesh: Any) -> None:
    with pytest.raises(MeshOpError, match="which are CPUs"):
        monarch.ones(3, mesh=mesh).cuda()


def test_autocast_for_gpus_of_the_program_is_refused(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = monarch.ones(3, 3, mesh=gpus)
    asked = torch.is_autocast_enabled
    # torch.autocast("cuda") disables itself without a GPU.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda" or asked(kind))
    with pytest.raises(MeshOpError, match=r"use torch.autocast\('cpu', dtype=torch"):
        _ = x @ x
    monkeypatch.undo()
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16


def test_ops_make_tensors_on_the_device_of_a_rank() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    sent = Template("rank_op", (), (("aten", "full", "default"), [[2], Input(0), cpu], 0, False), {"device": cpu})
    assert devices.on_device(sent, "cpu") is sent
    found = devices.on_device(sent, "cuda")
    assert found.kwargs == {"device": gpu} and found.args[1] == [[2], Input(0), gpu]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", ["", "causal", "bool", "added"])
def test_plain_attention_has_the_values_and_gradients_of_torch(masked: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = None
    if masked == "bool":
        mask = torch.rand(5, 5) < 0.7
        mask[:, 0] = True
    elif masked == "added":
        mask = torch.randn(5, 5, dtype=dtype)
    causal = masked == "causal"
    expected = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)
    out, sums = devices.attention(q, k, v, 0.0, causal, attn_mask=mask)
    assert torch.allclose(out, expected, atol=1e-6) and out.stride() == expected.stride()
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        found = devices.gradients_of_attention(grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))
