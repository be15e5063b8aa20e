"""Rank-local tensors and actors: arguments of endpoints, and endpoints that make tensors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch as torch_

import monarch
from monarch.actor import Actor, as_endpoint, endpoint
from monarch.distributed import Mesh
from monarch.exceptions import ArgumentError, MeshOpError, SerializationError, TensorError

torch: Any = torch_


class Adder(Actor):
    def __init__(self) -> None:
        self.total: Any = torch.zeros(2)

    @endpoint
    def add(self, x: Any, *, times: int = 1) -> Any:
        assert type(x) is torch.Tensor
        self.total += x * times
        return self.total.tolist()

    @endpoint(propagate=lambda x: x)
    def added(self, x: Any) -> Any:
        return x + self.total

    @endpoint
    def learnt(self, x: Any) -> Any:
        return x.sum(), [x * 2]

    def plain(self, x: Any) -> Any:
        return x + 1

    def with_port(self, port: Any, x: Any) -> None:
        port.send(x - 1)

    @endpoint
    def broken(self, x: Any) -> Any:
        raise ValueError("cannot")


@pytest.fixture(scope="module")
def shared_adders(shared_mesh: Any) -> Any:
    return shared_mesh.procs.spawn("adders", Adder)


@pytest.fixture
def adders(shared_adders: Any, mesh: Any) -> Any:
    return shared_adders


def numbered(mesh: Any) -> Any:
    return torch.ones_like(mesh.rank_tensor("dp")) * mesh.rank_tensor("dp") * 2 + mesh.rank_tensor("mp")


def test_endpoints_get_the_tensor_of_their_rank(mesh: Any, adders: Any) -> None:
    with mesh.activate():
        x = torch.ones(2) * numbered(mesh)
    futures = []
    for _ in range(3):
        futures.append(adders.add.call(x, times=2))
        # The value is that of the call.
        x += 10
    found = [future.get(30).values() for future in futures]
    assert found[0] == [[2.0 * rank] * 2 for rank in range(4)]
    assert found[2] == [[6.0 * rank + 60] * 2 for rank in range(4)]
    assert adders.slice(dp=1, mp=1).add.call_one([x][0]).get(30) == [6.0 * 3 + 60 + 33] * 2


def test_rref_makes_tensors_in_order(mesh: Any, adders: Any) -> None:
    with mesh.activate():
        zero = torch.zeros(2)
        before = adders.added.rref(zero)
        adders.add.call(torch.ones(2)).get(30)
        x = torch.ones(2)
        total, (doubled,) = adders.learnt.rref(x)
    after = adders.added.rref(zero)
    assert (monarch.inspect(after) - monarch.inspect(before)).tolist() == [1, 1]
    assert monarch.inspect(total + doubled[0]).item() == 4
    with pytest.raises(TensorError, match="ValueError: cannot"):
        monarch.inspect(adders.broken.rref(x))
    assert monarch.inspect(x, dp=1, mp=1).tolist() == [1, 1]


def test_rref_of_as_endpoint_uses_its_propagate(mesh: Any, adders: Any) -> None:
    asked: list[str] = []

    def same(name: str) -> Any:
        return lambda x: [asked.append(name), x][1]

    with mesh.activate():
        x = torch.ones(2)
        for name in ("first", "second"):
            assert monarch.inspect(as_endpoint(adders.plain, propagate=same(name)).rref(x)).tolist() == [2, 2]
        assert monarch.inspect(as_endpoint(adders.added, propagate=same("third")).rref(x)).shape == (2,)
        assert asked == ["first", "second", "third"]
        assert monarch.inspect(as_endpoint(adders.plain).rref(x)).tolist() == [2, 2]
        port = as_endpoint(adders.with_port, explicit_response_port=True)
        assert monarch.inspect(port.rref(x)).tolist() == [0, 0]
    with pytest.raises(ArgumentError, match="propagate: expected a function"):
        as_endpoint(adders.plain, propagate="guess").rref(x)


def test_wrong_tensors_for_endpoints_raise(mesh: Any, adders: Any) -> None:
    other = Mesh(shape=(2,), mesh_dim_names=("gpus",))
    with other.activate():
        x = torch.ones(2)
    with pytest.raises(SerializationError, match=r"to an actor on another mesh; move it first with tensor.to_mesh"):
        adders.add.call(x).get(30)
    with mesh.activate():
        rows = torch.nn.functional.embedding(numbered(mesh)[None] * 3, torch.ones(4, 2))
    with pytest.raises(SerializationError, match=r"has no value, because|embedding failed"):
        adders.add.call(rows[0]).get(60)
    with pytest.raises(TensorError, match="embedding failed"):
        monarch.inspect(rows)
    with pytest.raises(MeshOpError, match="each rank has its own value; save one rank's value"):
        pickle.dumps(x)
    with pytest.raises(ArgumentError, match="no device mesh is active"):
        adders.learnt.rref()
    other.stop().get(30)
