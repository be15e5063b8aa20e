"""Checked collectives: ranks with mismatching collectives get an error with the mismatch, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import group
from monarch.exceptions import ActorError, CollectiveMismatchError, GroupError

CHECKED = {"MONARCH_CHECK_COLLECTIVES": "1"}


def reduce() -> float:
    import torch
    import torch.distributed as dist

    here = torch.ones(1)
    dist.all_reduce(here, group=group())
    return here.item()


class Trainer(Actor):
    def __init__(self) -> None:
        self.rank = current_rank().rank

    @endpoint
    def late(self) -> float:
        return reduce()

    @endpoint
    def total(self, odd: str = "") -> float:
        """Rank 1 does something else."""
        import torch
        import torch.distributed as dist

        other = odd and self.rank == 1
        here = torch.ones(5 if other and odd == "shape" else 4, 2)
        if other and odd == "dtype":
            here = here.double()
        if other and odd == "operation":
            dist.barrier(group())
        else:
            dist.all_reduce(here, group=group())
        return here[0, 0].item()

    @endpoint
    def after_a_message(self) -> float:
        import torch
        import torch.distributed as dist

        if self.rank < 2:
            group()
            (dist.send if self.rank == 0 else dist.recv)(torch.ones(1), 1 - self.rank)
        return reduce()

    @endpoint
    def along(self, mesh: Any, odd: bool) -> float:
        import torch
        import torch.distributed as dist

        here = torch.ones(3 if odd and self.rank == 1 else 2)
        dist.all_reduce(here, group=mesh.group("gpus"))
        return here[0].item()

    @endpoint
    def step(self) -> None:
        if self.rank == 1:
            raise ValueError("bad sample 17")
        reduce()

    @endpoint
    def alone(self) -> float:
        return reduce() if self.rank == 0 else 0.0


def values(future: Any) -> list[Any]:
    return list(future.get(30).values())


def mismatch(future: Any) -> str:
    with pytest.raises(ActorError) as caught:
        future.get(30)
    assert isinstance(caught.value.exception, CollectiveMismatchError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("odd", "texts"),
    [
        (
            "shape",
            [
                "ranks 0,2 called all_reduce (sum) of float32[4, 2] at test_checked_collectives.py line ",
                "rank 1 called all_reduce (sum) of float32[5, 2] at test_checked_collectives.py line ",
                "pass tensors of matching shape and dtype",
            ],
        ),
        (
            "dtype",
            [
                "called all_reduce (sum) of float32[4, 2] at",
                "called all_reduce (sum) of float64[4, 2] at",
                "pass tensors of matching shape and dtype",
            ],
        ),
        (
            "operation",
            ["ranks 0,2 called all_reduce", "rank 1 called barrier at", "call the same collective on all ranks"],
        ),
    ],
)
def test_mismatch_names_ranks_shapes_and_dtypes(procs: Callable[..., Any], odd: str, texts: list[str]) -> None:
    trainers = procs(3, env=CHECKED).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [3.0] * 3
    said = mismatch(trainers.total.call(odd))
    assert all(text in said for text in texts), said
    assert values(trainers.total.call()) == [3.0] * 3


def test_messages_are_left_alone(procs: Callable[..., Any]) -> None:
    assert values(procs(3, env=CHECKED).spawn("trainers", Trainer).after_a_message.call()) == [3.0] * 3


def test_groups_along_axis_are_checked(procs: Callable[..., Any]) -> None:
    mesh = procs({"hosts": 2, "gpus": 2}, env=CHECKED)
    trainers = mesh.spawn("trainers", Trainer)
    assert values(trainers.along.call(mesh, False)) == [2.0] * 4
    assert "rank 1 called all_reduce (sum) of float32[3]" in mismatch(trainers.along.call(mesh, True))


def test_rank_that_raises_frees_ranks_that_check(procs: Callable[..., Any]) -> None:
    trainers = procs(3, env=CHECKED).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [3.0] * 3
    with pytest.raises(ActorError, match="bad sample 17") as caught:
        trainers.step.call().get(30)
    for rank in (0, 2):
        assert "rank 1 failed before joining it" in caught.value.failures[rank]
    assert values(trainers.total.call()) == [3.0] * 3


def test_checked_wait_for_finished_ranks_is_reported(
    procs: Callable[..., Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_COLLECTIVE_WAIT_S", "0.4")
    trainers = procs(2, env=CHECKED).spawn("trainers", Trainer)
    assert values(trainers.total.call()) == [2.0] * 2
    future = trainers.alone.call()
    seen: list[str] = []

    def shown() -> str:
        seen.append(capfd.readouterr().err)
        return "".join(seen)

    assert wait_until(lambda: "(all_reduce(), #2 of the default group) that rank 1 has not joined" in shown())
    trainers.slice(gpus=1).late.call_one().get(30)
    assert values(future) == [2.0, 0.0]


class Caller(Actor):
    @endpoint
    def call(self, code: str) -> float:
        """Run code in which ``odd`` is true on rank 1."""
        import torch
        import torch.distributed as dist
        import torch.distributed._functional_collectives as functional

        rank = current_rank().rank
        exec(
            code,
            {"torch": torch, "dist": dist, "functional": functional, "rank": rank, "odd": rank == 1, "group": group()},
        )
        return 1.0


ONES = "x = torch.ones(4 + odd)\n"
DIFFERENT = {
    "all_reduce": (ONES + "dist.all_reduce(x)", "all_reduce (sum) of float32[5]"),
    "op": ("dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)", "all_reduce (max)"),
    "async_op": (ONES + "dist.all_reduce(x, async_op=True).wait()", "all_reduce (sum) of float32[5]"),
    "broadcast": (ONES + "dist.broadcast(x, 0)", "broadcast of float32[5] from rank 0"),
    "src": ("dist.broadcast(torch.ones(4), int(odd))", "broadcast of float32[4] from rank 1"),
    "all_gather": (ONES + "dist.all_gather([torch.ones_like(x) for _ in range(3)], x)", "all_gather of float32[5]"),
    "all_gather_into_tensor": (
        ONES + "dist.all_gather_into_tensor(torch.ones(3 * len(x)), x)", "all_gather_into_tensor of float32[5]"
    ),
    "reduce_scatter": (
        ONES + "dist.reduce_scatter(torch.ones_like(x), [x, x, x])", "reduce_scatter (sum) of 3 of float32[5]"
    ),
    "reduce_scatter_tensor": (
        ONES + "dist.reduce_scatter_tensor(x, torch.ones(3 * len(x)))", "reduce_scatter_tensor (sum) of float32[15]"
    ),
    "all_to_all_single": (
        "x = torch.ones(6)\nd = [1, 2, 3] if odd else [2, 2, 2]\ndist.all_to_all_single(torch.ones(6), x, None, d)",
        "all_to_all_single of [float32[1], float32[2], float32[3]] into 3 of float32[2]",
    ),
    "reduce": (ONES + "dist.reduce(x, 2)", "reduce (sum) of float32[5] to rank 2"),
    "gather": (
        ONES + "dist.gather(x, [torch.ones(4) for _ in range(3)] if rank == 0 else None, 0)",
        "gather of float32[5] to rank 0",
    ),
    "scatter": (
        "dist.scatter(torch.ones(4 + odd), [torch.ones(4)] * 3 if rank == 0 else None, 0)", "scatter of float32[5]"
    ),
    "barrier": ("dist.all_reduce(torch.ones(4)) if odd else dist.barrier()", "rank 1 called all_reduce"),
    "object": (
        "dist.broadcast_object_list([1], 0) if odd else dist.all_gather_object([None] * 3, 1)",
        "rank 1 called broadcast of int64[1] from rank 0",
    ),
    "functional": (ONES + "functional.all_reduce(x, 'sum', group) + 0", "all_reduce of float32[5]"),
    "DistributedDataParallel": (
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "y = m(torch.ones(1, 2)).sum()\n"
        "dist.all_reduce(torch.ones(1)) if odd else y.backward()",
        "ranks 0,2 called all_reduce of float32[6]",
    ),
    "DTensor": (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import distribute_tensor, Replicate, Shard\n"
        "d = distribute_tensor(torch.ones(6), init_device_mesh('cpu', (3,)), [Shard(0)])\n"
        "dist.all_reduce(torch.ones(1)) if odd else d.redistribute(placements=[Replicate()]).to_local()",
        "rank 1 called all_reduce (sum) of float32[1]",
    ),
    "inference": ("with torch.inference_mode(): dist.all_reduce(torch.ones(4 + odd))", "of float32[5]"),
}  # fmt: skip
ALIKE = """
x = torch.arange(3.0) + rank
dist.all_reduce(x, async_op=True).wait()
assert x.tolist() == [3, 6, 9]
parts = [torch.zeros(1) for _ in range(3)]
dist.all_gather(parts, torch.full((1,), float(rank)))
assert torch.cat(parts).tolist() == [0, 1, 2]
dist.all_to_all_single(out := torch.zeros(3), torch.full((3,), float(rank)))
assert out.tolist() == [0, 1, 2]
sizes = [[0, 1, 2], [1, 0, 1], [2, 1, 0]]
given = sizes[rank]
taken = [each[rank] for each in sizes]
dist.all_to_all_single(torch.zeros(sum(taken)), torch.ones(sum(given)), taken, given)
dist.reduce_scatter(out := torch.zeros(1), [torch.ones(1)] * 3)
assert out.item() == 3
dist.scatter(torch.zeros(2), [torch.ones(2)] * 3 if rank == 0 else None, 0)
dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(3)] if rank == 2 else None, 2)
dist.broadcast(x, 1)
dist.reduce(x, 2)
dist.all_gather_object(seen := [None] * 3, {"rank": rank, "text": "x" * rank})
assert [each["rank"] for each in seen] == [0, 1, 2]
dist.gather_object("a" * rank, [None] * 3 if rank == 0 else None, 0)
dist.broadcast_object_list([rank, "x" * rank], 1)
dist.scatter_object_list([None], ["a", "bb", "ccc"] if rank == 0 else None, 0)
pair = dist.new_group([0, 1])
if rank < 2: dist.all_reduce(torch.ones(2), group=pair)
dist.barrier()
dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(3): model(torch.ones(1, 2)).sum().backward()
"""


def test_different_calls_of_each_kind_raise(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    caller = mesh.spawn("caller", Caller)
    mesh.check_collectives()
    for name, (code, text) in DIFFERENT.items():
        said = mismatch(caller.call.call(code))
        assert text in said and "no collective has started" in said, (name, said)
        # The group works.
        assert values(caller.call.call("x = torch.ones(1); dist.all_reduce(x); assert x.item() == 3")) == [1.0] * 3


def test_equal_calls_pass_the_check(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    caller = mesh.spawn("caller", Caller)
    for on in (True, False, True):
        mesh.check_collectives(on)
        assert values(caller.call.call(ALIKE)) == [1.0] * 3


def test_check_leaves_nothing_when_turned_off(procs: Callable[..., Any]) -> None:
    kernels = (
        "has = torch._C._dispatch_has_kernel_for_dispatch_key; assert has('c10d::allreduce_', 'BackendSelect') is "
    )
    mesh = procs(2)
    caller = mesh.spawn("caller", Caller)
    assert values(caller.call.call(f"{kernels}False")) == [1.0] * 2
    mesh.check_collectives()
    assert values(caller.call.call(f"{kernels}True")) == [1.0] * 2
    mesh.check_collectives(False)
    assert values(caller.call.call(f"{kernels}False")) == [1.0] * 2


def test_check_is_refused_while_ranks_run_a_call(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    trainers = mesh.spawn("trainers", Trainer)
    future = trainers.slice(gpus=0).late.call_one()
    assert wait_until(lambda: mesh.where().values()[0].state == "running")
    with pytest.raises(GroupError, match="rank 0: is running a call; try again when no call is running"):
        mesh.check_collectives()
    trainers.slice(gpus=1).late.call_one().get(30)
    assert future.get(30) == 2.0
    mesh.check_collectives()
    assert "rank 1 called barrier" in mismatch(trainers.total.call("operation"))


def test_new_rank_checks_as_the_others_do(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    trainers = mesh.spawn("trainers", Trainer)
    mesh.check_collectives()
    assert values(trainers.total.call()) == [2.0] * 2
    bigger = mesh.resize(gpus=3)
    grown = bigger.spawn("grown", Trainer)
    assert values(grown.total.call()) == [3.0] * 3
    assert "rank 1 called all_reduce (sum) of float32[5, 2]" in mismatch(grown.total.call("shape"))


def test_rank_that_does_not_come_is_named_after_the_timeout(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    caller = mesh.spawn("caller", Caller)
    mesh.check_collectives()
    code = (
        "from datetime import timedelta\n"
        "both = dist.new_group([0, 1], timeout=timedelta(seconds=1))\n"
        "try:\n"
        "    if not odd: dist.barrier(both)\n"
        "except RuntimeError as error:\n"
        "    assert 'timed out after 1 s: rank 1 has called no collective' in str(error), str(error)\n"
        "else:\n"
        "    assert odd\n"
    )
    assert values(caller.call.call(code)) == [1.0] * 2
