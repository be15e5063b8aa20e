"""Training on a mesh gives the losses of one process, however parameters are sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import monarch
from monarch.exceptions import ArgumentError, AxisError


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu()).relu()
        return self.out(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.block = Block(16, 2)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("places", torch.randn(6, 16) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.tokens(tokens) + self.places))


def batch_of(kind: type[nn.Module], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step % 3)
    if kind is Mlp:
        return torch.randn(8, 12, generator=draw), torch.randint(5, (8,), generator=draw)
    if kind is Conv:
        return torch.randn(8, 1, 8, 8, generator=draw), torch.randint(5, (8,), generator=draw)
    tokens = torch.randint(11, (8, 7), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def losses(model: nn.Module, kind: type[nn.Module], optimizer: Any, steps: int, place: Callable[[Any], Any]) -> Any:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    found: list[float] = []
    for step in range(steps):
        inputs, target = batch_of(kind, step)
        optimizer.zero_grad()
        result = model(place(inputs))
        loss = F.cross_entropy(result.flatten(0, -2), place(target).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


def rows(mesh: Any) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: monarch.distribute(tensor, mesh, ["dp", *[None] * (tensor.dim() - 1)])


STYLES = {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
FEW: list[tuple[type[nn.Module], str, Any]] = [
    (Mlp, "AdamW", {"up.bias": ["mp"], "up.weight": ["mp", None], "down.weight": [None, "mp"]}),
    (Conv, "SGD", "replicate"),
    (Transformer, "Adafactor", "replicate"),
    (Mlp, "SGD", "shard"),
]
PLANS: list[tuple[type[nn.Module], str, Any]] = [
    *[(kind, name, "replicate") for kind in (Mlp, Conv, Transformer) for name in OPTIMIZERS],
    *[(kind, "AdamW", "shard") for kind in (Mlp, Conv, Transformer)],
    (Mlp, "SGD", "shard"),
    (Mlp, "Adafactor", "shard"),
    FEW[0],
    (Transformer, "AdamW", STYLES),
]


def compare(mesh: Any, kind: type[nn.Module], optimizer: str, plan: Any, steps: int) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = monarch.module_to_mesh(copy.deepcopy(plain), mesh, plan)
    expected = losses(plain, kind, OPTIMIZERS[optimizer](plain.parameters()), steps, lambda tensor: tensor)
    found = losses(model, kind, OPTIMIZERS[optimizer](model.parameters()), steps, rows(mesh))
    assert found == pytest.approx(expected, rel=2e-3, abs=2e-4) and expected[-1] < expected[0]


@pytest.mark.parametrize(("kind", "optimizer", "plan"), FEW, ids=[f"{each[0].__name__}-{each[1]}" for each in FEW])
def test_losses_are_those_of_one_process(mesh: Any, kind: type[nn.Module], optimizer: str, plan: Any) -> None:
    compare(mesh, kind, optimizer, plan, 8)


@pytest.mark.parametrize(("kind", "optimizer", "plan"), PLANS, ids=[f"{each[0].__name__}-{each[1]}" for each in PLANS])
def test_fifty_losses_are_those_of_one_process(mesh: Any, kind: type[nn.Module], optimizer: str, plan: Any) -> None:
    compare(mesh, kind, optimizer, plan, 50)


@pytest.mark.parametrize("plan", ["replicate", "shard"])
def test_statistics_of_norms_are_those_of_one_process(mesh: Any, plan: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model: Any = monarch.module_to_mesh(copy.deepcopy(plain), mesh, plan)
    x = torch.randn(8, 4, 5, 5)
    norms: list[float] = []
    for each, inputs in ((plain, x), (model, rows(mesh)(x))):
        each(inputs).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(each.parameters(), 1.0, norm_type=float("inf")).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-3, abs=1e-6)
    alone = dict(plain.named_buffers()) | {name: each.grad for name, each in plain.named_parameters()}
    spread = dict(model.named_buffers()) | {name: each.grad for name, each in model.named_parameters()}
    for name, value in alone.items():
        torch.testing.assert_close(spread[name].full_tensor(), value, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("of_input", [["dp", None, "mp"], [("dp", "mp"), None, None], None])
@pytest.mark.parametrize("of_statistics", [None, ["mp"], [("dp", "mp")]])
def test_running_statistics_may_be_divided(mesh: Any, of_input: Any, of_statistics: Any) -> None:
    # Two channels: some of the four ranks have none.
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2), torch.ones(2)
    torch.nn.functional.batch_norm(x, *expected, training=True)
    found = [monarch.distribute(each, mesh, of_statistics) for each in (torch.zeros(2), torch.ones(2))]
    torch.nn.functional.batch_norm(monarch.distribute(x, mesh, of_input), *found, training=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
        assert one.spec == (of_statistics or [None])


def test_pruned_modules_run_with_the_plan_shard(mesh: Any) -> None:
    model = monarch.module_to_mesh(nn.Linear(4, 4, bias=False), mesh, "shard")
    expected = model.weight.full_tensor().detach()
    # Pruning takes the parameter away, and makes the weight of another one and a mask.
    model.weight_orig = nn.Parameter(model.weight.detach())
    del model._parameters["weight"]
    model.weight = model.weight_orig * 2
    x = torch.randn(8, 4)
    result = model(monarch.distribute(x, mesh, ["dp", None]))
    torch.testing.assert_close(result.full_tensor().detach(), x @ expected.T * 2)
    result.sum().backward()
    assert model.weight_orig.grad is not None


def test_lazy_modules_move_at_their_first_call(mesh: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    monarch.module_to_mesh(model, mesh, {"0.weight": ["mp", None], "2.*": "shard"})
    # The optimizer keeps the parameters that get their shapes later.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = rows(mesh)(torch.randn(8, 12))
    before = model(x).square().mean()
    before.backward()
    weight: Any = model[0].weight
    assert type(model[0]) is nn.Linear and weight.spec == ["mp", None] == weight.grad.spec
    last: Any = model[2].weight
    assert last.spec == [None, ("dp", "mp")]
    optimizer.step()
    assert model(x).square().mean().item() < before.item()


def test_wrapped_modules_have_their_plain_names_in_plans(mesh: Any) -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(12, 4)), nn.Linear(4, 4))
    monarch.module_to_mesh(model, mesh, {"0.weight": ["mp", None]})
    weights: list[Any] = [each for each in model.parameters() if each.dim() == 2]
    assert [each.spec for each in weights] == [["mp", None], [None, None]]
    model(rows(mesh)(torch.randn(8, 12))).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_fused_sgd_computes_as_in_one_process(mesh: Any) -> None:
    found: list[Any] = []
    for place in (lambda model: model, lambda model: monarch.module_to_mesh(model, mesh, "shard")):
        torch.manual_seed(0)
        model = place(nn.Linear(12, 4))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 12)).square().mean().backward()
            optimizer.step()
        found.append(model.weight.detach())
    torch.testing.assert_close(found[1].full_tensor(), found[0])


def test_sharded_parameters_take_a_part_of_the_memory(mesh: Any) -> None:
    model = monarch.module_to_mesh(Transformer(), mesh, "shard")
    assert model.tokens.weight is model.head.weight and model.tokens.weight.spec == [None, ("dp", "mp")]
    inputs, _ = batch_of(Transformer, 0)
    model(rows(mesh)(inputs)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.grad is not None
        moments: Any = optimizer.state[parameter]["exp_avg"]
        assert parameter.grad.spec == parameter.spec == moments.spec
        assert monarch.fetch(parameter.detach(), dp=0).numel() * 4 == parameter.numel()


def test_modules_on_meta_are_made_on_the_ranks(mesh: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        other = nn.MultiheadAttention(8, 2)
        broken = Transformer()
    monarch.module_to_mesh(model, mesh, {"0.weight": ["dp", "mp"]})
    weight: Any = model[0].weight
    assert weight.spec == ["dp", "mp"] and 0.05 < weight.detach().std().item() < 0.3
    model(monarch.randn(6, 12, mesh=mesh, spec=["dp", None])).sum().backward()
    assert weight.grad is not None
    assert monarch.module_to_mesh(other, mesh).in_proj_weight.detach().std().item() > 0
    with pytest.raises(ArgumentError, match=r"Transformer\) has tensors on the meta device"):
        monarch.module_to_mesh(broken, mesh)
    assert broken.tokens.weight.is_meta


def test_state_dicts_go_to_the_mesh_and_back(mesh: Any) -> None:
    plain = Transformer()
    model = monarch.module_to_mesh(Transformer(), mesh, "auto")
    model.load_state_dict(plain.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), plain.state_dict()[name])
    other = monarch.module_to_mesh(Transformer(), mesh, "shard")
    other.load_state_dict(model.state_dict())
    plain.load_state_dict({name: value.full_tensor() for name, value in other.state_dict().items()})
    assert torch.equal(other.tokens.weight.full_tensor(), plain.tokens.weight)


@pytest.mark.parametrize("plan", ["replicate", "shard"])
def test_grad_scaler_skips_steps_with_infinite_gradients(mesh: Any, plan: str) -> None:
    model = monarch.module_to_mesh(Mlp(), mesh, plan)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.up.weight.full_tensor()
    scaler.scale(model(monarch.full((4, 12), float("inf"), mesh=mesh)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.up.weight.full_tensor(), before) and scaler.get_scale() == 4
    optimizer.zero_grad()
    scaler.scale(model(monarch.ones(4, 12, mesh=mesh)).pow(2).sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.up.weight.full_tensor(), before)


def test_wrong_plans_are_refused_with_a_reason(mesh: Any) -> None:
    wrong: Any = 3
    with pytest.raises(ArgumentError, match=r"expected a torch.nn.Module, got int"):
        monarch.module_to_mesh(wrong, mesh)
    with pytest.raises(ArgumentError, match="expected one of replicate, shard, auto"):
        monarch.module_to_mesh(Mlp(), mesh, "tensor")
    with pytest.raises(ArgumentError, match=r"'\*.weights' matches no parameter"):
        monarch.module_to_mesh(Mlp(), mesh, {"*.weights": None})
    with pytest.raises(ArgumentError, match="ColwiseParallel is for Linear and Embedding"):
        monarch.module_to_mesh(Mlp(), mesh, {"norm": ColwiseParallel()})
    # A module without parameters of its own; nothing is moved before all styles are checked.
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    for style in (ParallelStyle, ColwiseParallel):
        with pytest.raises(ArgumentError, match=r"plan: .* for 0"):
            monarch.module_to_mesh(model, mesh, {"0": _made(style)})
    assert not any(hasattr(each, "monarch_layout") for each in model.parameters())
    with pytest.raises(AxisError, match="no axis 'tp'"):
        monarch.module_to_mesh(Mlp(), mesh, axis="tp")


def _made(style: Any) -> Any:
    class Own(style):
        def _apply(self, module: Any, device_mesh: Any) -> Any:
            return module

    return style() if style is ColwiseParallel else Own()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_on_divided_batches(mesh: Any, kind: Any) -> None:
    torch.manual_seed(0)
    alone = kind(5, 7, num_layers=2, batch_first=True, bidirectional=True)
    there = monarch.module_to_mesh(copy.deepcopy(alone), mesh)
    x = torch.randn(4, 6, 5)
    ours, _ = there(monarch.distribute(x, mesh, ["dp", None, None]))
    expected, _ = alone(x)
    ours.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(ours.detach().full_tensor(), expected, atol=1e-6)
    assert torch.allclose(there.weight_ih_l0.grad.full_tensor(), alone.weight_ih_l0.grad, atol=1e-5)
    assert torch.backends.mkldnn.enabled
    assert len(list(copy.deepcopy(there).parameters())) == len(list(alone.parameters()))
