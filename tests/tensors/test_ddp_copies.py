"""Modules in DDP of which one rank has a copy from another one: all begin afresh and train on."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from meshes import kill, values
from monarch._notebook.variables.holding import ddp_modules_in
from monarch._tensors.ddp_afresh import begin_afresh, reset_ddp
from monarch._tensors.ddp_compat import goes_along, settle
from monarch._wire.pickling import dumps, loads
from monarch.actor import Actor, current_rank, endpoint, heal_mesh

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
    def trains_after_a_pass(self, fails: bool) -> tuple[bool, int]:
        """Begin afresh with an evaluation, or with a pass that fails; return whether the training is as without."""
        import torch
        import torch.distributed as torch_distributed

        dist: Any = torch_distributed
        model, optimizer = self.make("plain")
        twin, own = self.make("plain")
        self.train(model, optimizer, 0)
        self.train(twin, own, 0)
        reset_ddp(model)
        if fails:
            reducer = dist.Reducer
            dist.Reducer = None
            try:
                model(torch.ones(2, 64))
            except TypeError:
                pass
            finally:
                dist.Reducer = reducer
            left = len(model._forward_pre_hooks)
        else:
            model.eval()
            with torch.inference_mode():
                model(torch.ones(2, 64))
            model.train()
            left = len(model._forward_pre_hooks)
        self.train(model, optimizer, 3)
        self.train(twin, own, 3)
        return all(torch.equal(*both) for both in zip(model.parameters(), twin.parameters(), strict=True)), left

    @endpoint
    def trains_beside(self, kind: str) -> bool:
        """Begin afresh beside objects that legitimately differ between ranks, and train."""
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        head = torch.nn.Linear(2, 2)
        model, optimizer = self.make("plain")
        others: list[Any] = []
        if kind == "zero":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        elif kind == "old":
            old = torch.optim.Adam(model.parameters(), lr=0.01)
            self.train(model, old, 0)
            others = [old, [old.step() for _ in range(self.rank)]]
        elif kind == "ignored":
            layers = torch.nn.ModuleDict({"shared": model.module, "own": head})
            layers.forward = model.module.forward
            kinds: Any = DistributedDataParallel
            kinds._set_params_and_buffers_to_ignore_for_model(layers, ["own.weight", "own.bias"])
            model = DistributedDataParallel(layers)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(self.rank):
                head(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            head(torch.ones(1, 2) * self.rank).sum().backward()
        elif kind == "head":
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.1 * (self.rank + 1)})
        else:
            others = [torch.amp.GradScaler("cpu", init_scale=2.0**self.rank)]
        self.train(model, optimizer, 0)
        reset_ddp(model)
        self.train(model, optimizer, 3)
        return bool(others or optimizer)

    @endpoint
    def trains_with_gradients(self, alike: bool) -> tuple[bool, bool]:
        """Begin afresh with gradients of an earlier pass; return whether the training is as without, and if they stay.

        Args:
            alike: whether all ranks have the same.
        """
        import torch

        model, optimizer = self.make("plain")
        twin, own = self.make("plain")
        self.train(model, optimizer, 0)
        self.train(twin, own, 0)
        reset_ddp(model)
        model.eval()
        for each in model.parameters():
            each.grad = torch.full_like(each, 0.0 if alike else float(self.rank))
        model(torch.ones(2, 64))
        kept = next(model.parameters()).grad is not None
        model.train()
        for one, other in ((model, optimizer), (twin, own)):
            # The first as in a loop that drops its gradients at the end.
            if one is twin:
                other.zero_grad()
            one(torch.ones(4, 64) * (self.rank + 1)).square().mean().backward()
            other.step()
        return all(torch.equal(*both) for both in zip(model.parameters(), twin.parameters(), strict=True)), kept

    @endpoint
    def keeps_buckets(self) -> bool:
        """Train with a hook that has a state for each bucket, and begin afresh without a new rank."""
        import torch

        model, optimizer = self.make("plain")
        errors: dict[int, Any] = {}
        # As torch's PowerSGD, not before the buckets are in their order.
        began: list[bool] = []

        def hook(_: Any, bucket: Any) -> Any:
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            if began:
                errors.setdefault(bucket.index(), torch.zeros_like(bucket.buffer())).add_(bucket.buffer())
            return future

        # Torch wants its own types here.
        hook.__annotations__.clear()
        model.register_comm_hook(None, hook)
        self.train(model, optimizer, 0)
        began.append(True)
        self.train(model, optimizer, 0)
        reset_ddp(model)
        self.train(model, optimizer, 0)
        return len(errors) > 1

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
    assert values(twins.compare.call(kind, 2)) == [(True, 0)] * SIZE


@pytest.mark.parametrize("fails", [False, True])
def test_training_goes_on_after_a_pass_without_gradients(twins: Any, fails: bool) -> None:
    assert values(twins.trains_after_a_pass.call(fails)) == [(True, 1)] * SIZE


@pytest.mark.parametrize("kind", ["zero", "old", "ignored", "head", "scaler"])
def test_objects_that_may_differ_are_not_refused(twins: Any, kind: str) -> None:
    assert values(twins.trains_beside.call(kind)) == [True] * SIZE


@pytest.mark.parametrize("alike", [False, True])
def test_gradients_of_a_pass_that_was_broken_off_are_dropped(twins: Any, alike: bool) -> None:
    assert values(twins.trains_with_gradients.call(alike)) == [(True, alike)] * SIZE


def test_hooks_with_a_state_for_each_bucket_go_on(twins: Any) -> None:
    assert values(twins.keeps_buckets.call()) == [True] * SIZE


def test_modules_that_torch_cannot_restore_stay_behind(twins: Any) -> None:
    assert values(twins.kept_apart.call()) == [[True, False, False]] * SIZE


def test_modules_are_found_inside_of_values(twins: Any) -> None:
    assert values(twins.inside.call()) == [[1, 1, 0, 2]] * SIZE


class Trainer(Actor):
    """Wraps its module in its constructor, as programs do."""

    def __init__(self, momentum: float) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(current_rank().rank)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)), bucket_cap_mb=0.001)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)

    def state_dict(self) -> Any:
        return self.model.module.state_dict(), self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.model.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    @endpoint
    def train(self, steps: int) -> float:
        import torch

        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(4, 8)).square().mean().backward()
            self.optimizer.step()
        return sum(each.double().abs().sum().item() for each in self.model.parameters())

    @endpoint
    def who(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()


@pytest.mark.parametrize("dead", [(1,), (0,), (0, 2)])
def test_actors_that_wrap_in_their_constructor_are_healed(procs: Callable[..., Any], dead: tuple[int, ...]) -> None:
    """New ones begin with the state of the copy."""
    trainers, calm = (procs(SIZE).spawn("trainers", Trainer, 0.9) for _ in range(2))
    for _ in range(3):
        values(trainers.train.call(2))
        kill(trainers, *dead)
        heal_mesh(trainers, copy_from="peer")
        # Another death before the first step: the new ranks have had no step yet.
        kill(trainers, 1)
        heal_mesh(trainers, copy_from=2 if 2 not in dead else "peer")
    expected = [values(calm.train.call(2)) for _ in range(4)][-1]
    assert values(trainers.train.call(2)) == expected and len({*expected}) == 1


@pytest.mark.parametrize("again", [False, True])
def test_new_ranks_begin_with_the_parameters_of_the_others(procs: Callable[..., Any], again: bool) -> None:
    """Without a copy, also if it is the first rank that is new, from which modules are synchronized else."""
    trainers, calm = (procs(SIZE).spawn("trainers", Trainer, 0.0) for _ in range(2))
    values(trainers.train.call(3))
    kill(trainers, 0)
    heal_mesh(trainers)
    if again:
        kill(trainers, 1)
        heal_mesh(trainers)
    values(calm.train.call(3))
    assert values(trainers.train.call(3)) == values(calm.train.call(3))
