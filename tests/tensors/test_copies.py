"""States copied from mesh to mesh: every layout yields the whole tensor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch._state.copy.endpoints import still_open
from monarch._state.rdma.plane import plane
from monarch._tensors.memory.views import Memory, memory_of
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import CopyReport, Part, copy_state, device_mesh
from monarch.exceptions import ActorError, ArgumentError, DeviceMeshError, ShapeError

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of a whole tensor, and into how many parts each dim is split."""


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count) % 251).to(dtype).view(shape)


def part_of(layout: Layout, rank: int) -> tuple[slice, ...]:
    """Return a rank's part of a tensor: parts are dealt out again if there are more ranks than parts."""
    shape, counts = layout
    found: list[slice] = []
    for size, count in zip(reversed(shape), reversed(counts), strict=True):
        rank, index = divmod(rank, count)
        found.append(slice(size * index // count, size * (index + 1) // count))
    return tuple(reversed(found))


class Keeper(Actor):
    """Keeps its share of some tensors."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @endpoint
    def lay_out(self, tensors: dict[str, tuple[Layout, str]], filled: bool) -> None:
        self.state = {}
        for name, (layout, dtype) in tensors.items():
            at = part_of(layout, current_rank().rank)
            value = whole(layout[0], getattr(torch, dtype))[at].contiguous()
            self.state[name] = Part(value if filled else torch.zeros_like(value), [each.start for each in at])

    def weights(self) -> dict[str, Any]:
        return self.state

    @endpoint
    async def weights_to_await(self) -> dict[str, Any]:
        return self.state

    @endpoint
    def right(self, tensors: dict[str, tuple[Layout, str]]) -> bool:
        """Whether its parts match the whole tensors."""
        for name, (layout, dtype) in tensors.items():
            expected = whole(layout[0], getattr(torch, dtype))[part_of(layout, current_rank().rank)]
            if not torch.equal(self.state[name].tensor, expected):
                return False
        return True

    @endpoint
    def set(self, state: Any) -> None:
        self.state = state

    @endpoint
    def get(self) -> Any:
        return self.state

    def die(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def fail(self) -> dict[str, Any]:
        raise ValueError("no weights yet")

    def nothing(self) -> dict[str, Any]:
        return {"step": 3}


class Sharded(Actor):
    """Has DTensors."""

    @endpoint
    def make(self, placement: str, value: float) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = device_mesh()
        layout = Replicate() if placement == "replicate" else Shard(int(placement))
        plain = torch.arange(15.0).view(5, 3) if value else torch.zeros(5, 3)
        self.tensor = distribute_tensor(plain, mesh, [layout] * mesh.ndim)

    def weights(self) -> dict[str, Any]:
        return {"model": {"w": self.tensor}, "step": 7}

    @endpoint
    def full(self) -> list[list[float]]:
        return self.tensor.full_tensor().tolist()


class Model(Actor):
    """A model sharded by FSDP2 over its ranks, or a plain one."""

    @endpoint
    def build(self, sharded: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
        if sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=device_mesh())

    def weights(self) -> dict[str, Any]:
        return self.model.state_dict()

    @endpoint
    def numbers(self) -> list[float]:
        with torch.no_grad():
            found = [getattr(each, "full_tensor", lambda each=each: each)() for each in self.model.parameters()]
        return torch.cat([each.flatten() for each in found]).tolist()


@pytest.fixture
def sides(procs: Callable[..., Any]) -> Any:
    """A source mesh and a target mesh, shared by all examples of a test."""
    return [procs(count).spawn("keepers", Keeper) for count in (4, 6)]


@st.composite
def tensors(draw: Any) -> tuple[dict[str, tuple[Layout, str]], dict[str, tuple[Layout, str]]]:
    """Some tensors, and their layout on a mesh of 4 and on one of 6."""
    have: dict[str, tuple[Layout, str]] = {}
    want: dict[str, tuple[Layout, str]] = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8", "float64", "bool"]))
        have[name] = (shape, _counts(draw, shape, 4)), dtype
        want[name] = (shape, _counts(draw, shape, 6)), dtype
    return have, want


def _counts(draw: Any, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    counts: list[int] = []
    for _ in shape:
        counts.append(draw(st.sampled_from([each for each in (1, 2, 3, 4, 6) if each <= ranks])))
        ranks //= counts[-1]
    return tuple(counts)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors())
def test_copy_between_any_layouts(sides: Any, layouts: Any) -> None:
    have, want = layouts
    source, target = sides
    source.lay_out.call(have, True).get(30)
    target.lay_out.call(want, False).get(30)
    report = copy_state(source.weights, target.weights).get(30)
    assert all(target.right.call(want).get(30).values())
    assert report.bytes_between_hosts == {}


def test_copy_from_one_to_all_and_back(procs: Callable[..., Any], host: Any) -> None:
    source, target = procs(1).spawn("source", Keeper), procs(4).spawn("target", Keeper)
    layout = {"w": (((2000, 300), (1, 1)), "float32"), "b": (((7,), (1,)), "int64")}
    source.lay_out.call(layout, True).get()
    target.lay_out.call(layout, False).get()
    report = copy_state(source.weights, target.weights).get(30)
    assert isinstance(report, CopyReport)
    assert (report.tensors, report.bytes) == (2, 4 * (2000 * 300 * 4 + 7 * 8))
    assert all(target.right.call(layout).get().values())
    source.lay_out.call(layout, False).get()
    copy_state(target.weights, source.weights).get(30)
    assert all(source.right.call(layout).get().values())


def test_copy_to_slice_and_program(procs: Callable[..., Any]) -> None:
    keepers = procs(4).spawn("keepers", Keeper)
    keepers.set.call({"w": torch.zeros(10)}).get()
    copy_state({"w": torch.arange(10.0)}, keepers.slice(gpus=slice(1, 3)).weights).get(30)
    assert [each["w"].sum().item() for each in keepers.get.call().get().values()] == [0.0, 45.0, 45.0, 0.0]
    # Both sides in the same processes.
    copy_state(keepers.slice(gpus=2).weights, keepers.slice(gpus=slice(3, 4)).weights).get(30)
    assert [each["w"].sum().item() for each in keepers.get.call().get().values()] == [0.0, 45.0, 45.0, 45.0]


def test_copy_between_actors_of_one_process(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    first, second = mesh.spawn("first", Keeper), mesh.spawn("second", Keeper)
    first.set.call({"w": torch.arange(10.0)}).get()
    second.set.call({"w": torch.zeros(10)}).get()
    copy_state(first.weights, second.weights).get(30)
    assert [each["w"].sum().item() for each in second.get.call().get().values()] == [45.0, 45.0]


@pytest.mark.parametrize(("source", "target"), [("0", "1"), ("1", "replicate"), ("replicate", "0")])
def test_copy_of_distributed_tensors(procs: Callable[..., Any], source: str, target: str) -> None:
    have, want = procs(2).spawn("have", Sharded), procs({"a": 1, "b": 2}).spawn("want", Sharded)
    have.make.call(source, 1.0).get(60)
    want.make.call(target, 0.0).get(60)
    report = copy_state(have.weights, want.weights).get(30)
    assert report.tensors == 1
    assert list(want.full.call().get(30).values()) == [torch.arange(15.0).view(5, 3).tolist()] * 2


@pytest.mark.slow
def test_copy_from_fsdp_to_plain_and_back(procs: Callable[..., Any]) -> None:
    trainers, generator = procs(2).spawn("trainers", Model), procs(1).spawn("generator", Model)
    trainers.build.call(True, 1).get(60)
    generator.build.call(False, 2).get(60)
    expected = trainers.numbers.call().get(60)[0]
    copy_state(trainers.weights, generator.weights).get(30)
    assert generator.numbers.call_one().get() == expected
    trainers.build.call(True, 3).get(60)
    copy_state(generator.weights, trainers.weights).get(30)
    assert list(trainers.numbers.call().get(60).values()) == [expected] * 2


def test_uncopyable_states_are_errors(procs: Callable[..., Any]) -> None:
    source, target = procs(1).spawn("source", Keeper), procs(2).spawn("target", Keeper)
    source.set.call({"w": torch.zeros(4)}).get()
    target.set.call({"w": torch.zeros(4, dtype=torch.int64)}).get()
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: copy_state(7, target.weights), ArgumentError, "source: expected a method of a mesh of actors"),
        (lambda: copy_state(source.weights, {}), ArgumentError, "target: expected a method of a mesh of actors"),
        (
            lambda: copy_state(source.weights, target.weights, timeout=-1),
            ArgumentError,
            "timeout: expected seconds above 0, got -1",
        ),
        (
            lambda: copy_state(source.weights, target.weights),
            ArgumentError,
            "'w' has dtype float32 in the source but int64",
        ),
        (
            lambda: copy_state({"v": torch.zeros(4)}, target.weights),
            ShapeError,
            "no source has tensor 'w'; sources have v",
        ),
        (lambda: copy_state(source.fail, target.weights), ActorError, "no weights yet"),
        (lambda: copy_state(source.nothing, target.weights), ArgumentError, "the state has no tensors"),
        (lambda: copy_state({"w": torch.zeros(4, 4).t()}, target.weights), ArgumentError, "'w' is not contiguous"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call().get(30)
    with pytest.raises(ArgumentError, match="expected an index >= 0 for each of the 2 dims"):
        Part(torch.zeros(2, 2), [0])
    # Nothing is exported any more, and the actors live.
    from monarch._meshes.actors.ask import ask

    assert ask(target, still_open).get(10) == {0: 0, 1: 0}
    assert target.get.call().get()[1]["w"].dtype == torch.int64


def test_copy_can_be_awaited(procs: Callable[..., Any]) -> None:
    class Waiting(Actor):
        def __init__(self) -> None:
            self.state = {"w": torch.ones(3)}

        @endpoint
        async def weights(self) -> Any:
            return self.state

        @endpoint
        async def total(self) -> float:
            return self.state["w"].sum().item()

    waiting = procs(2).spawn("waiting", Waiting)
    copy_state({"w": torch.arange(3.0)}, waiting.weights).get(30)
    assert list(waiting.total.call().get().values()) == [3.0, 3.0]


def test_death_of_source_is_an_error(procs: Callable[..., Any]) -> None:
    source, target = procs(2).spawn("source", Keeper), procs(2).spawn("target", Keeper)
    for side in (source, target):
        side.set.call({"w": torch.zeros(4)}).get()
    with pytest.raises(DeviceMeshError, match="SIGKILL"):
        copy_state(source.die, target.weights).get(30)
    # The targets can be used.
    copy_state({"w": torch.ones(4)}, target.weights).get(30)
    assert target.get.call().get()[1]["w"].sum().item() == 4.0


def test_state_is_exported_whole_or_not_at_all(procs: Callable[..., Any]) -> None:
    procs(1)

    def memories() -> Iterator[Memory]:
        yield memory_of(bytearray(8), "the first part")
        raise OSError("no descriptor for the second part")

    before = len(plane().registry)
    with pytest.raises(OSError, match="no descriptor"):
        plane().share_all(memories())
    assert len(plane().registry) == before
