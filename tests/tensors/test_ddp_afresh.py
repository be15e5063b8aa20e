"""Modules in DDP that begin afresh: what is as in the run without a failure, and what is refused."""

from __future__ import annotations

import copy
import gc
import io
import os
from collections.abc import Callable
from typing import Any

import pytest

from meshes import kill, values
from monarch._notebook.variables.holding import ddp_modules_in, holding
from monarch._tensors.ddp_afresh import begin_afresh, reset_ddp
from monarch.actor import Actor, current_rank, endpoint, heal_mesh
from monarch.exceptions import ActorError, MonarchError

SIZE = 3


def layers(count: int = 4, seed: int = 0) -> Any:
    """Return a module that DDP divides into several buckets."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(count)])


class Freezing(Actor):
    """Trains a model whose parameters it freezes and unfreezes, beside one like it that is never reset."""

    def pair(self, **options: Any) -> list[Any]:
        from torch.nn.parallel import DistributedDataParallel

        return [DistributedDataParallel(layers(), bucket_cap_mb=0.005, **options) for _ in range(2)]

    def step(self, model: Any, seed: int) -> None:
        import torch

        # Each rank has data of its own.
        torch.manual_seed(100 * seed + current_rank().rank)
        loss = model(torch.randn(4, 32)).square().mean()
        if loss.requires_grad:
            loss.backward()
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad
                    each.grad = None

    @endpoint
    def frozen(self, count: int, copied: bool) -> bool:
        """Begin afresh while the first layers are frozen; return whether the training is as without."""
        import torch

        pair = self.pair(find_unused_parameters=True)
        for model in pair:
            self.step(model, 1)
            for each in model.module[:count].parameters():
                each.requires_grad_(False)
        if copied and current_rank().rank == 1:
            kept = io.BytesIO()
            torch.save(pair[0], kept)
            pair[0] = torch.load(io.BytesIO(kept.getvalue()), weights_only=False)
        (begin_afresh if copied else reset_ddp)(pair[0])
        for model in pair:
            self.step(model, 2)
            for each in model.parameters():
                each.requires_grad_(True)
            self.step(model, 3)
        same = zip(pair[0].parameters(), pair[1].parameters(), strict=True)
        return all(torch.equal(*both) for both in same) and all(each.requires_grad for each in pair[0].parameters())

    @endpoint
    def copied_while_waiting(self, way: str) -> list[float]:
        """Copy a model that waits, or rename its parameters meanwhile; return sums of the trained parameters."""
        import torch

        model = self.pair(find_unused_parameters=way == "renamed")[0]
        if way == "renamed":
            for part in model.module:
                weight = part._parameters.pop("weight")
                part.register_parameter("weight_orig", weight)
                part.weight = weight
        with torch.no_grad():
            for each in model.parameters():
                # As after a Stop in different steps.
                each += current_rank().rank
        reset_ddp(model)
        if way == "deepcopy":
            model = copy.deepcopy(model)
        elif way == "file":
            kept = io.BytesIO()
            torch.save(model, kept)
            model = torch.load(io.BytesIO(kept.getvalue()), weights_only=False)
        for seed in range(3):
            self.step(model, seed)
        return [round(each.double().sum().item(), 9) for each in model.parameters()]

    @endpoint
    def asked_differently(self) -> bool:
        """Train on where a failure has asked one rank, and a copy the other; return whether it is as without."""
        import torch

        pair = self.pair()
        for model in pair:
            self.step(model, 1)
        (begin_afresh if current_rank().rank else reset_ddp)(pair[0])
        for model in pair:
            self.step(model, 2)
        return all(torch.equal(*both) for both in zip(pair[0].parameters(), pair[1].parameters(), strict=True))

    @endpoint
    def saved(self) -> tuple[bool, bool]:
        """Return whether files of a model name this package, before and while it waits to begin afresh."""
        import torch

        model = self.pair()[0]
        found: list[bool] = []
        for _ in range(2):
            file = io.BytesIO()
            torch.save(model, file)
            found.append(b"monarch" in file.getvalue())
            reset_ddp(model)
        return found[0], found[1]

    @endpoint
    def searches(self) -> list[Any]:
        """Return what is found in values that share much, or are too large for a search."""
        one, other = self.pair()
        data = [[] for _ in range(600_000)]
        shared = [[1], [2]]
        variables: dict[str, Any] = {"a": [shared, one], "b": [shared], "one": one, "c": {"x": [other, one]}, "d": 1}
        each = {name: len(found) for name, found in holding(variables, [one, other]).items()}
        once = {name: len(found) for name, found in holding(variables, [one, other], once=True).items()}
        return [each, once, len(ddp_modules_in([data, [[[one]]]])), len(ddp_modules_in([[one], data]))]


@pytest.fixture
def freezing(procs: Callable[..., Any]) -> Any:
    return procs(2).spawn("freezing", Freezing)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_parameters_frozen_meanwhile_are_reduced_later(freezing: Any, count: int, copied: bool) -> None:
    assert values(freezing.frozen.call(count, copied)) == [True] * 2


@pytest.mark.parametrize("way", ["itself", "deepcopy", "file", "renamed"])
def test_copies_of_a_waiting_model_begin_afresh_too(freezing: Any, way: str) -> None:
    first, second = values(freezing.copied_while_waiting.call(way))
    assert first == second


def test_ranks_that_were_asked_differently_begin_together(freezing: Any) -> None:
    assert values(freezing.asked_differently.call()) == [True] * 2


def test_files_of_a_waiting_model_do_not_name_this_package(freezing: Any) -> None:
    assert values(freezing.saved.call()) == [(False, False)] * 2


def test_search_stops_and_large_values_may_have_any_module(freezing: Any) -> None:
    each, once, in_large, early = values(freezing.searches.call())[0]
    assert each == {"a": 1, "one": 1, "c": 2} and once == {"one": 1, "c": 1}
    assert (in_large, early) == (2, 2)


class Wrapped(Actor):
    """Wraps its model in its constructor, in one of several ways."""

    def __init__(self, kind: str) -> None:
        import torch
        import torch.distributed as torch_distributed
        from torch.nn.parallel import DistributedDataParallel

        dist: Any = torch_distributed
        rank = current_rank().rank
        options: dict[str, Any] = {
            "unsynced": {"init_sync": False},
            "buffers": {"forward_sync_buffers": False},
            "group": {"process_group": dist.new_group() if kind == "group" else None},
        }.get(kind, {})
        model = layers(seed=0 if kind == "unsynced" else rank)
        if kind == "buffers":
            model.register_buffer("mark", torch.tensor([float(rank)]))
        self.model = DistributedDataParallel(model, bucket_cap_mb=0.005, **options)
        if kind == "builtin":
            self.model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        if kind == "frozen heap":
            gc.freeze()
        kinds: Any = torch.optim.Adam if kind == "adam" else torch.optim.SGD
        self.kind, self.late = kind, None
        self.optimizer = kinds(self.model.parameters(), lr=0.01)

        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.1) if kind == "scheduled" else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if kind == "scaled" else None
        if kind == "twin":
            self.twin = copy.deepcopy(self.model)

    @endpoint
    def train(self, steps: int = 2) -> float:
        import torch

        if self.kind == "late":
            self.optimizer = self.late = self.late or torch.optim.Adam(self.model.parameters(), lr=0.01)
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 32)).square().mean()
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if self.scheduler is not None:
                self.scheduler.step()
        return sum(each.double().abs().sum().item() for each in self.model.parameters())

    @endpoint
    def mark(self, value: float | None) -> float:
        """Set a buffer if a value is given; return it."""
        buffer: Any = self.model.module.mark
        if value is not None:
            buffer.fill_(value + current_rank().rank)
        return buffer.item()

    @endpoint
    def fill(self, value: float) -> None:
        """Give all parameters a value that no constructor gives them."""
        import torch

        with torch.no_grad():
            for each in self.model.parameters():
                each.fill_(value)

    @endpoint
    def who(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    def clear(self) -> None:
        self.optimizer.state.clear()

    @endpoint
    def settle(self) -> None:
        """Give all ranks the same settings."""
        import torch

        if self.scheduler is not None:
            self.scheduler.last_epoch = 0
            self.optimizer.param_groups[0]["lr"] = 0.01
        if self.scaler is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    @endpoint
    def set_scale(self, scale: float) -> None:
        assert self.scaler is not None
        self.scaler.update(scale)

    @endpoint
    def fail(self, rank: int) -> None:
        if current_rank().rank == rank:
            raise ValueError("nobody reads this")


@pytest.mark.parametrize("kind", ["plain", "unsynced", "builtin", "frozen heap"])
def test_healed_constructors_train_on_together(procs: Callable[..., Any], kind: str) -> None:
    wrapped = procs(SIZE).spawn("wrapped", Wrapped, kind)
    before = values(wrapped.train.call())[0]
    kill(wrapped, 1)
    heal_mesh(wrapped)
    after = values(wrapped.train.call())
    assert len({*after}) == 1 and abs(after[0] - before) < 1.0


def test_new_rank_gets_buffers_that_others_have_of_their_own(procs: Callable[..., Any]) -> None:
    wrapped = procs(SIZE).spawn("wrapped", Wrapped, "buffers")
    values(wrapped.train.call())
    assert values(wrapped.mark.call(None)) == [0.0] * SIZE
    values(wrapped.mark.call(5.0))
    kill(wrapped, 2)
    heal_mesh(wrapped)
    values(wrapped.train.call())
    assert values(wrapped.mark.call(None)) == [5.0, 6.0, 5.0]


def test_lost_state_of_an_optimizer_is_refused_on_all_ranks(procs: Callable[..., Any]) -> None:
    wrapped = procs(SIZE).spawn("wrapped", Wrapped, "adam")
    values(wrapped.train.call())
    kill(wrapped, 1)
    heal_mesh(wrapped)
    for _ in range(2):
        with pytest.raises(ActorError, match="has a state on ranks 0,2 which rank 1 lacks, so they would") as caught:
            values(wrapped.train.call())
        assert len(caught.value.failures) == SIZE
    values(wrapped.clear.call())
    assert len({*values(wrapped.train.call())}) == 1


@pytest.mark.parametrize("kind", ["scheduled", "scaled"])
def test_other_settings_of_a_new_rank_are_refused(procs: Callable[..., Any], kind: str) -> None:
    wrapped = procs(SIZE).spawn("wrapped", Wrapped, kind)
    values(wrapped.train.call())
    if kind == "scaled":
        values(wrapped.set_scale.call(32.0))
    # The first rank, which the advice does not name.
    kill(wrapped, 0)
    heal_mesh(wrapped)
    what = "gradient scalers" if kind == "scaled" else "optimizers"
    here, others = ("scale=64", "scale=32") if kind == "scaled" else ("lr=0.01", "lr=0.001")
    differ = f"the {what} of a model in DistributedDataParallel differ: {here} on rank 0; {others} on ranks 1-2; "
    with pytest.raises(ActorError, match=differ) as caught:
        values(wrapped.train.call())
    assert len(caught.value.failures) == SIZE and "--copy-from 1" in str(caught.value)
    values(wrapped.settle.call())
    assert len({*values(wrapped.train.call())}) == 1


def test_optimizer_that_is_made_later_is_refused_too(procs: Callable[..., Any]) -> None:
    wrapped = procs(2).spawn("wrapped", Wrapped, "late")
    values(wrapped.train.call())
    kill(wrapped, 0)
    heal_mesh(wrapped)
    with pytest.raises(ActorError, match="has a state on rank 1 which rank 0 lacks"):
        values(wrapped.train.call())


def test_model_that_has_begun_is_no_longer_new(procs: Callable[..., Any]) -> None:
    """Though another model of its process still waits, which has never been trained."""
    wrapped = procs(2).spawn("wrapped", Wrapped, "twin")
    values(wrapped.train.call())
    for rank in (1, 0):
        kill(wrapped, rank)
        heal_mesh(wrapped)
        if rank:
            values(wrapped.fill.call(0.01))
        trained = values(wrapped.train.call())
        assert len({*trained}) == 1 and trained[0] < 60.0


@pytest.mark.parametrize("rank", [0, 1])
def test_failed_actor_begins_with_the_state_of_the_others(procs: Callable[..., Any], rank: int) -> None:
    """It is made again in its living process, so no connection breaks and the others must hear of it."""
    wrapped = procs(SIZE).spawn("wrapped", Wrapped, "plain")
    values(wrapped.fill.call(0.01))
    before = values(wrapped.train.call(1))[0]
    wrapped.fail.broadcast(rank)
    with pytest.raises(MonarchError):
        values(wrapped.train.call())
    heal_mesh(wrapped)
    after = values(wrapped.train.call(1))
    assert len({*after}) == 1 and abs(after[0] - before) < 5.0 and before < 60.0


def test_constructor_with_a_group_of_its_own_says_why(procs: Callable[..., Any]) -> None:
    wrapped = procs(2).spawn("wrapped", Wrapped, "group")
    values(wrapped.train.call())
    kill(wrapped, 1)
    with pytest.raises(MonarchError, match="must not wait for other ranks"):
        heal_mesh(wrapped, timeout=3.0)
