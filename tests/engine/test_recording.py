"""``monarch.compile``: a recorded step computes what the function does, to the last bit."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import monarch
from monarch.exceptions import ArgumentError
from training_steps import MLP, Convolution, Transformer, batch, trained

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM_W = partial(torch.optim.AdamW, lr=1e-2)
ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("kind", [MLP, Convolution, Transformer])
@pytest.mark.parametrize(
    "optimizer", [SGD, ADAM_W, partial(ADAM_W, fused=True), ADAFACTOR], ids=["sgd", "adamw", "fused", "adafactor"]
)
def test_recorded_training_equals_unrecorded_bit_for_bit(mesh: Any, kind: Any, optimizer: Any) -> None:
    losses, values, _ = trained(mesh, kind, optimizer, lambda step: step, 8)
    again, values_again, step = trained(mesh, kind, optimizer, monarch.compile, 8)
    assert again == losses
    assert all(torch.equal(one, two) for one, two in zip(values, values_again, strict=True))
    assert "1 recordings" in repr(step)


@pytest.mark.parametrize("optimizer", [ADAM_W, ADAFACTOR], ids=["adamw", "adafactor"])
def test_sharded_recorded_steps_give_the_losses_of_one_process(mesh: Any, optimizer: Any) -> None:
    def losses(model: Any, place: Any, wrap: Any) -> list[float]:
        opt = optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)

        def step(x: Any, y: Any) -> Any:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            return loss

        run, found = wrap(step), []
        for at in range(9):
            draw = torch.Generator().manual_seed(at % 3)
            x, y = torch.randn(8, 16, generator=draw), torch.randint(4, (8,), generator=draw)
            found.append(run(place(x), place(y)).item())
            schedule.step()
        assert wrap is not monarch.compile or "1 recordings" in repr(run)
        return found

    def rows(tensor: torch.Tensor) -> Any:
        return monarch.distribute(tensor, mesh, ["dp", *[None] * (tensor.dim() - 1)])

    torch.manual_seed(0)
    plain = MLP(0.0)
    model = monarch.module_to_mesh(copy.deepcopy(plain), mesh, "shard")
    expected = losses(plain, lambda tensor: tensor, lambda step: step)
    assert losses(model, rows, monarch.compile) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert expected[-1] < expected[0]


def test_inductor_computes_the_same(mesh: Any) -> None:
    losses, _, _ = trained(mesh, MLP, ADAM_W, lambda step: step, 8)
    again, _, _ = trained(mesh, MLP, ADAM_W, partial(monarch.compile, backend="inductor"), 8)
    assert again == pytest.approx(losses, rel=1e-5)


def test_each_shape_is_traced_once(mesh: Any) -> None:
    model = monarch.module_to_mesh(nn.Linear(16, 4), mesh)

    @monarch.compile
    def step(x: Any, y: Any) -> Any:
        return F.cross_entropy(model(x), y)

    for size in (8, 16, 8, 16, 8):
        x, y = batch(mesh, size, size)
        assert step(x, y).item() == F.cross_entropy(model(x), y).item()
    assert "2 recordings" in repr(step)


def test_gradient_checkpointing_repeats_its_dropout(mesh: Any) -> None:
    def losses(wrap: Any) -> list[float]:
        torch.manual_seed(3)
        model = monarch.module_to_mesh(MLP(0.5), mesh)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            opt.zero_grad()
            loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
            loss.backward()
            opt.step()
            return loss

        run = wrap(step)
        return [run(*batch(mesh, at)).item() for at in range(10)]

    assert losses(monarch.compile) == losses(lambda step: step)


def test_results_are_what_the_function_returns(mesh: Any) -> None:
    state = {"total": monarch.zeros(4, mesh=mesh)}

    @monarch.compile
    def step(x: Any, scale: float) -> Any:
        state["total"] = state["total"] + x.sum(0)
        x.mul_(scale)
        return {"x": x, "pair": (x + 1, [None, "text", 3]), "total": state["total"]}

    x = monarch.ones(2, 4, mesh=mesh, spec=["dp", None])
    for at in range(1, 5):
        found = step(x, 2.0)
        assert found["x"] is x and found["pair"][1] == [None, "text", 3] and found["total"] is state["total"]
        assert x.full_tensor().tolist() == [[2.0**at] * 4] * 2
        assert found["pair"][0].sum().item() == 8 * (2.0**at + 1)
    assert state["total"].tolist() == [2.0 * (1 + 2 + 4 + 8)] * 4
    assert step(x, 3.0)["x"].sum().item() == 8 * 16 * 3


def test_random_ops_draw_new_numbers_from_the_seed(mesh: Any) -> None:
    x = monarch.ones(64, mesh=mesh, spec=["dp"])

    def step(x: Any) -> Any:
        noise = torch.zeros_like(x).normal_()
        x.normal_()
        return F.dropout(x, 0.5) + noise + torch.rand_like(x)

    def drawn(function: Any) -> list[Any]:
        torch.manual_seed(5)
        return [function(x).full_tensor() for _ in range(4)]

    plain, recorded = drawn(step), drawn(monarch.compile(step))
    assert all(torch.equal(one, two) for one, two in zip(plain, recorded, strict=True))
    assert not torch.equal(recorded[2], recorded[3])


def test_graph_and_cost_show_ops_and_collectives(mesh: Any) -> None:
    model = monarch.module_to_mesh(nn.Linear(16, 4, bias=False), mesh)

    @monarch.compile
    def step(x: Any) -> Any:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with pytest.raises(ArgumentError, match="no recording yet"):
        step.graph()
    for at in range(3):
        step(batch(mesh, at)[0])
    graph, cost = step.graph(), step.cost()
    assert graph.ops > 5 and graph.collectives >= 1 and "all_reduce" in graph.code
    # Each rank of dp multiplies 4 rows forward, and backward for the weight.
    assert cost.flops == 2 * (2 * 4 * 16 * 4)
    # The gradient of the weight, and the loss.
    assert cost.collectives["dp"] >= 16 * 4 * 4
    assert any("test_recording.py" in row.line for row in cost.rows)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ArgumentError, match='expected "eager" or "inductor"'):
        monarch.compile(print, backend="fast")
