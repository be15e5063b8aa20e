"""Modules in DDP of which one rank has a copy from another one: all begin afresh and train on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._tensors.ddp_compat import begin_afresh, ddp_modules_in, goes_along, reset_ddp, settle
from monarch._wire.pickling import dumps, loads
from monarch.actor import Actor, current_rank, endpoint

SIZE = 3
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "hooked": {},
    "subclass": {},
}


class Twins(Actor):
    """Trains a module in DDP, and one like it that is never reset, on the same data on all ranks."""

    def __init__(self) -> None:
        self.rank = current_rank().rank

    def make(self, kind: str) -> tuple[Any, Any]:
        import torch
        from torch import nn
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        # Several buckets, which the first backward pass puts into another order.
        layers = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), *[nn.Linear(96, 96) for _ in range(4)])
        parallel = type("Own", (DistributedDataParallel,), {}) if kind == "subclass" else DistributedDataParallel
        model: Any = parallel(layers, bucket_cap_mb=0.05, **KINDS[kind])
        if kind == "hooked":
            model.register_comm_hook(None, fp16_compress_hook)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(self, model: Any, optimizer: Any, first: int) -> None:
        import torch

        for step in range(first, first + 3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()

    @endpoint
    def compare(self, kind: str, copies: int) -> tuple[bool, int]:
        """Return whether both are equal, and how many hooks are left for the next pass."""
        import torch

        model, optimizer = self.make(kind)
        twin, own = self.make(kind)
        self.train(model, optimizer, 0)
        self.train(twin, own, 0)
        for _ in range(copies):
            if self.rank == copies % SIZE:
                assert goes_along(model)
                body, buffers = dumps((model, optimizer), here=True)
                model, optimizer = loads(body, [memoryview(bytearray(each)) for each in buffers])
                settle(model)
            # Twice: a failure and a copy may both ask for it.
            reset_ddp(model)
            begin_afresh(model)
            self.train(model, optimizer, 3)
            self.train(twin, own, 3)
        equal = all(torch.equal(*both) for both in zip(model.parameters(), twin.parameters(), strict=True))
        return equal, len(model._forward_pre_hooks)

    @endpoint
    def inside(self) -> list[int]:
        """Return how many modules in DDP are found in values."""
        model, other = self.make("plain")[0], self.make("plain")[0]
        holder = SimpleNamespace(models={"one": [model]})
        kind = type("Kind", (), {"of_the_class": other})
        values: list[Any] = [
            [holder],
            [lambda: model],
            [model.module, "text", kind],
            [holder, {2: (other,)}],
        ]
        return [len(ddp_modules_in(each)) for each in values]

    @endpoint
    def kept_apart(self) -> list[bool]:
        """Return whether modules go along that are not restored by what torch pickles."""
        import torch.distributed as torch_distributed
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        dist: Any = torch_distributed
        own, built_in = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group()), self.make("plain")[0]
        built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return [goes_along(each) for each in (self.make("plain")[0], own, built_in)]


@pytest.fixture
def twins(procs: Callable[..., Any]) -> Any:
    return procs(SIZE).spawn("twins", Twins)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_a_copy_bit_by_bit(twins: Any, kind: str) -> None:
    assert twins.compare.call(kind, 2).get(60).values() == [(True, 0)] * SIZE


def test_modules_that_torch_cannot_restore_stay_behind(twins: Any) -> None:
    assert twins.kept_apart.call().get(60).values() == [[True, False, False]] * SIZE


def test_modules_are_found_inside_of_values(twins: Any) -> None:
    assert twins.inside.call().get(60).values() == [[1, 1, 0, 2]] * SIZE
