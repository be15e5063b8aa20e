"""Ops on distributed tensors give what they give in one process."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import monarch
from monarch.exceptions import ArgumentError, AxisError, MeshOpError

torch.manual_seed(0)
A, B = torch.randn(16, 12), torch.randn(12, 8)
Q = torch.randn(4, 2, 6, 8)


@pytest.fixture
def a(mesh: Any) -> Any:
    return monarch.distribute(A, mesh, ["dp", None])


@pytest.fixture
def b(mesh: Any) -> Any:
    return monarch.distribute(B, mesh, [None, "mp"])


def check(result: Any, expected: torch.Tensor) -> None:
    value = result.full_tensor() if isinstance(result, monarch.Tensor) else result
    torch.testing.assert_close(value.detach(), expected.detach(), atol=1e-4, rtol=1e-3)


def changed(tensor: Any, index: Any) -> Any:
    tensor = tensor.clone()
    tensor[index] = 5
    return tensor


foreach_norm: Any = torch.ops.aten._foreach_norm.Scalar
OPS: dict[str, Callable[[Any], Any]] = {
    "view": lambda t: t.view(4, 4, 12).transpose(1, 2).reshape(48, 4),
    "row": lambda t: t[3],
    "slice": lambda t: t[2:7, ::2],
    "rows": lambda t: t[torch.tensor([1, 5, 2])],
    "set slice": lambda t: changed(t, slice(0, 2)),
    "set row": lambda t: changed(t, 3),
    "set part": lambda t: changed(t, (slice(3, 9), slice(None, None, 3))),
    "set mask": lambda t: changed(t, t > 0),
    "set mask of rows": lambda t: changed(t, t.sum(1) > 0),
    "set rows": lambda t: changed(t, torch.tensor([1, 5])),
    "norm of order inf": lambda t: torch.linalg.vector_norm(torch.stack(foreach_norm([t, t * 2], float("inf"))), 3.5),
    "hessian": lambda t: torch.func.hessian(lambda x: (x**3).sum())(t[0, :3]),
    "in place": lambda t: t.clone().add_(1).mul_(2).relu_(),
    "in place on a view": lambda t: (lambda c: (c.t()[0].mul_(3), c)[1])(t.clone()),
    "masked": lambda t: t.masked_fill(t > 0, 0.0),
    "where": lambda t: torch.where(t > 0, t, -t),
    "sum": lambda t: t.sum(),
    "sum along": lambda t: t.sum(0),
    "mean": lambda t: t.mean(1),
    "std": lambda t: t.std(),
    "max": lambda t: t.max(),
    "max along": lambda t: t.max(0)[0],
    "norm": lambda t: t.norm(),
    "prod": lambda t: t.prod(),
    "softmax": lambda t: t.softmax(-1),
    "sort": lambda t: t.sort(0)[0],
    "topk": lambda t: t.topk(3, 1)[0],
    "cumsum": lambda t: t.cumsum(0),
    "argmax": lambda t: t.argmax(1),
    "cat": lambda t: torch.cat([t, t], 1),
    "stack": lambda t: torch.stack([t, t]),
    "chunk": lambda t: t.chunk(3, 1)[1],
    "unbind": lambda t: t.unbind(0)[2],
    "bfloat16": lambda t: t.bfloat16(),
    "grad": lambda t: torch.func.grad(lambda x: (x**3).sum())(t),
    "vmap": lambda t: torch.func.vmap(lambda row: row.sum())(t),
    "jvp": lambda t: torch.func.jvp(lambda x: x * x, (t,), (t,))[1],
    "foreach": lambda t: torch.ops.aten._foreach_mul([t, t], 2.0)[1],
    "layer norm": lambda t: F.layer_norm(t, (12,)),
    "cross entropy": lambda t: F.cross_entropy(t, torch.arange(16) % 12),
    "embedding": lambda t: F.embedding(torch.tensor([[1, 2], [3, 4]]), t),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("name", OPS)
def test_op_gives_the_values_of_one_process(a: Any, name: str) -> None:
    check(OPS[name](a), OPS[name](A))


@pytest.mark.parametrize("name", ["view", "slice", "set slice", "set row", "sum along", "cumsum"])
def test_op_on_a_tensor_divided_along_both_axes(mesh: Any, name: str) -> None:
    check(OPS[name](monarch.distribute(A, mesh, ["mp", "dp"])), OPS[name](A))
    check(OPS[name](monarch.distribute(A, mesh, [("dp", "mp"), None])), OPS[name](A))


def test_matmul_of_tensors_divided_along_other_axes(a: Any, b: Any) -> None:
    product = a @ b
    assert product.spec == ["dp", "mp"]
    check(product, A @ B)
    check(torch.einsum("ij,jk->ki", a, b), (A @ B).T)


def test_convolution_and_attention(mesh: Any) -> None:
    images, kernel = torch.randn(4, 3, 8, 8), torch.randn(2, 3, 3, 3)
    check(F.conv2d(monarch.distribute(images, mesh, ["dp", None, None, None]), kernel), F.conv2d(images, kernel))
    q = monarch.distribute(Q, mesh, ["dp", "mp", None, None]).requires_grad_()
    expected = Q.clone().requires_grad_()
    for each in (q, expected):
        F.scaled_dot_product_attention(each, each, each, is_causal=True).pow(2).sum().backward()
    assert q.grad is not None and expected.grad is not None
    check(q.grad, expected.grad)


def test_gradients_are_those_of_one_process(a: Any, b: Any) -> None:
    x, y = a.detach().requires_grad_(), A.clone().requires_grad_()
    seen: list[Any] = []
    x.register_hook(seen.append)
    (x @ b).relu().pow(2).mean().backward()
    (y @ B).relu().pow(2).mean().backward()
    assert y.grad is not None and len(seen) == 1
    check(x.grad, y.grad)


def test_gradient_through_a_write_into_a_part(a: Any) -> None:
    grads: list[Any] = []
    for each in (a.detach().requires_grad_(), A.clone().requires_grad_()):
        double = each * 2
        double[0] = 0
        (double * double).sum().backward()
        grads.append(each.grad)
    check(*grads)


def test_checkpointing_draws_the_same_numbers_again(a: Any, b: Any) -> None:
    x = a.detach().requires_grad_()

    def layer(tensor: Any) -> Any:
        return F.dropout(tensor @ b, 0.5)

    torch.manual_seed(1)
    plain = layer(x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    torch.manual_seed(1)
    again: Any = checkpoint(layer, x, use_reentrant=False)
    check(again, plain.full_tensor())
    (grad,) = torch.autograd.grad(again.sum(), x)
    check(grad, expected.full_tensor())


def test_autocast_computes_in_bfloat16(a: Any, b: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
    with torch.inference_mode():
        check(a @ b, A @ B)


def test_values_are_fetched_where_python_needs_them(a: Any) -> None:
    total = a.sum()
    assert float(total) == pytest.approx(A.sum().item(), abs=1e-4) and f"{total:.2f}" == f"{A.sum():.2f}"
    assert bool(a.mean() < 1) and a.tolist() == A.tolist() and (a.numpy() == A.numpy()).all()
    assert torch.equal(a, a.clone()) and torch.allclose(a, a + 1e-9) and not torch.equal(a, a + 1)
    assert [row.sum().item() for row in a[:2]] == pytest.approx(A[:2].sum(1).tolist(), abs=1e-4)
    assert 'spec=["dp", None], mean=' in repr(a) and "value=[" in repr(a[0])


def test_copies_and_files_have_the_values(a: Any) -> None:
    check(copy.deepcopy(a), A)
    assert torch.equal(pickle.loads(pickle.dumps(a)), A)
    file = io.BytesIO()
    torch.save({"a": a}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["a"], A)


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda t: torch.randint_like(t, 3, 90),
        lambda t: F.dropout(t, 0.5),
        lambda t: t.clone().uniform_(-1, 1),
        lambda t: t.clone().normal_(3, 2),
        lambda t: torch.bernoulli(t.sigmoid()),
    ],
)
def test_random_numbers_do_not_depend_on_the_spec(mesh: Any, draw: Callable[[Any], Any]) -> None:
    drawn: list[torch.Tensor] = []
    for spec in (["dp", None], [None, ("dp", "mp")], ["mp", "dp"], None):
        torch.manual_seed(7)
        drawn.append(draw(monarch.distribute(A, mesh, spec)).full_tensor())
    assert all(torch.equal(each, drawn[0]) for each in drawn)
    torch.manual_seed(8)
    assert not torch.equal(draw(monarch.distribute(A, mesh, None)).full_tensor(), drawn[0])


def test_op_without_a_rule_names_op_and_line(a: Any) -> None:
    with pytest.raises(MeshOpError, match=r"aten.nonzero.default cannot run .* shape of its result .*test_ops.py"):
        a.nonzero()
    with pytest.raises(MeshOpError, match=r"Fetch the values with tensor.full_tensor\(\); torch.where"):
        a.replicate().unique()
    check(
        torch.linalg.inv(a[:12].replicate() @ a[:12].replicate().T + torch.eye(12)),
        torch.linalg.inv(A[:12] @ A[:12].T + torch.eye(12)),
    )


def test_mixed_tensors_are_refused_with_a_reason(mesh: Any, a: Any) -> None:
    big = monarch.zeros(1024, 1024, mesh=mesh)
    with pytest.raises(MeshOpError, match=r"4.2 MB .* distribute it once"):
        _ = big + torch.zeros(1024, 1024)
    with pytest.raises(MeshOpError, match="different meshes"):
        _ = a + monarch.zeros(16, 12, mesh=mesh.slice(dp=0))
    with pytest.raises(RuntimeError, match="same reduction dim"):
        _ = a @ a
    with pytest.raises(MeshOpError, match="stays on the devices"):
        torch.empty_like(a, device="vulkan")
    assert a.to("meta").is_meta
    with pytest.raises(AxisError, match="no axis 'pp'"):
        a.redistribute(["pp", None])
    with pytest.raises(ArgumentError, match="2 entries"):
        a.redistribute(["dp"])


def test_terms_have_the_order_of_their_norm(a: Any) -> None:
    # The program's metadata decide how the terms of ranks are combined.
    for order, kind in ((3.0, "_NormPartial(3.0)"), (float("inf"), "Partial(max)")):
        assert kind in str(foreach_norm([a], order)[0].placements)


def test_gradient_through_a_write_by_a_mask(a: Any) -> None:
    alone, sharded = A.clone().requires_grad_(), a.clone().requires_grad_()
    for each in (alone, sharded):
        (each * 1).index_put_((each > 0,), torch.tensor(0.0)).square().sum().backward()
    assert alone.grad is not None
    check(sharded.grad, alone.grad)


def test_rows_of_a_divided_table_have_views(mesh: Any) -> None:
    table, rows = torch.randn(12, 8), torch.tensor([[0, 5, 11], [7, 2, 1]])
    sharded = monarch.distribute(table, mesh, ["mp", None])
    found = F.embedding(monarch.distribute(rows, mesh, ["dp", None]), sharded)
    check(found.flatten(0, 1) @ B.T, table[rows.flatten()] @ B.T)


def test_calls_that_need_memory_of_the_program_raise(a: Any) -> None:
    calls: list[Callable[[], Any]] = [a.share_memory_, lambda: a.apply_(abs), lambda: a.map_(a, max)]
    for call in calls:
        with pytest.raises(MeshOpError, match=r"on its ranks; full_tensor\(\) returns them"):
            call()
    assert torch.equal(torch.from_dlpack(a), A)


@pytest.mark.parametrize("rows", [8, 5])
def test_losses_and_their_gradients_equal_one_process(mesh: Any, rows: int) -> None:
    value, target = torch.rand(2, rows, 3) * 0.8 + 0.1
    names = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "l1_loss")
    for name in (*names, "binary_cross_entropy_with_logits", "kl_div"):
        function: Any = getattr(torch.nn.functional, name)
        for reduction in ("batchmean" if name == "kl_div" else "mean", "sum")[: 2 if rows == 5 else 1]:
            alone = value.clone().requires_grad_()
            expected = function(alone, target, reduction=reduction)
            expected.backward()
            sharded = monarch.distribute(value, mesh, ["dp", None]).requires_grad_()
            loss = function(sharded, monarch.distribute(target, mesh, ["dp", None]), reduction=reduction)
            loss.backward()
            grad: Any = sharded.grad
            assert abs(loss.item() - expected.item()) < 1e-4, (name, reduction)
            torch.testing.assert_close(grad.full_tensor(), alone.grad, msg=f"{name}, {reduction}")


def test_distributions_check_their_arguments(mesh: Any) -> None:
    logits = monarch.distribute(A, mesh, ["dp", "mp"]).requires_grad_()
    drawn = torch.distributions.Categorical(logits=logits)
    drawn.log_prob(drawn.sample()).sum().backward()
    assert logits.grad is not None
    check(drawn.entropy(), torch.distributions.Categorical(logits=A).entropy())
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(logits.detach(), monarch.zeros(16, 12, mesh=mesh, spec=["dp", "mp"]))
    checks: Any = torch
    assert not checks._is_all_true(monarch.zeros(4, mesh=mesh, spec=["dp"]) > 0)
    assert checks._is_any_true(monarch.arange(4, mesh=mesh, spec=["dp"]) > 2)
