"""Tensors over three ranks, of which some may have no element."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.distributed import Mesh


@pytest.fixture(scope="module")
def shared_three() -> Iterator[Any]:
    made = Mesh(shape=(3,), mesh_dim_names=("dp",))
    assert made.procs.initialized.get(300)
    assert made.execute(os.getpid).values()
    yield made
    made.stop().get(30)


@pytest.fixture
def three(shared_three: Any, leaks: Any) -> Any:
    return shared_three


OPS: dict[str, Callable[[Any], Any]] = {
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax of rows": lambda t: t.amax(0),
    "amin": lambda t: t.amin(),
    "argmax": lambda t: t.argmax(),
    "argmin of rows": lambda t: t.argmin(0),
    "aminmax": lambda t: t.aminmax(dim=0).max,
    "largest norm": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "smallest norm": lambda t: torch.linalg.vector_norm(t, -float("inf"), 0),
    "gather": lambda t: t.gather(0, torch.zeros(1, 2, dtype=torch.long)),
    "embedding": lambda t: F.embedding(torch.tensor([0, t.shape[0] - 1]), t),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", OPS)
def test_ops_have_values_if_some_parts_are_empty(three: Any, name: str, rows: int) -> None:
    value = torch.randn(rows, 2)
    sharded = monarch.distribute(value, three, ["dp", None])
    assert [len(monarch.fetch(sharded, dp=rank)) for rank in range(3)][2] == 0
    torch.testing.assert_close(OPS[name](sharded).full_tensor(), OPS[name](value))


def test_largest_gradient_is_clipped_if_some_parts_are_empty(three: Any) -> None:
    plain = torch.nn.Linear(3, 4)
    sharded = monarch.module_to_mesh(torch.nn.Linear(3, 4), three, "shard")
    sharded.load_state_dict(plain.state_dict())
    data = torch.randn(6, 3)
    for model, batch in ((plain, data), (sharded, monarch.distribute(data, three, None))):
        model(batch).square().sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1, float("inf")) for each in (plain, sharded)]
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-5)
    torch.testing.assert_close(sharded.bias.grad.full_tensor(), plain.bias.grad)


def test_collectives_of_rank_local_tensors_raise_no_warnings(three: Any) -> None:
    three.execute(warnings.simplefilter, "error")
    try:
        with three.activate():
            x = torch.ones(3) * three.rank_tensor("dp")
        assert monarch.inspect(monarch.reduce(x, "dp", "stack"), dp=0).tolist() == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
        assert monarch.inspect(monarch.reduce(x, "dp", "sum", scatter=True), dp=1).item() == 3
    finally:
        three.execute(warnings.simplefilter, "default")
