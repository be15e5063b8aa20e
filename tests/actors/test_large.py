"""Large arguments and results: in shared memory, private at the receiver, and freed after their last use."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from typing import Any

import numpy
import pytest

from leaks import live_segments, wait_until
from monarch._node.current import current_node
from monarch._wire import pickling
from monarch._wire.pickle_sink import THRESHOLD
from monarch._wire.pickling import SHARED
from monarch.actor import Actor, current_rank, endpoint
from monarch.exceptions import SupervisionError

MB = 1 << 20


def memory() -> int:
    """Return the private and shared bytes of this process: its cost for the machine."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Large(Actor):
    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint
    def sum(self, array: Any) -> float:
        return float(array.sum())

    @endpoint
    def digest(self, data: Any) -> str:
        return hashlib.md5(data).hexdigest()

    @endpoint
    def write(self, array: Any) -> float:
        array[:] = current_rank().rank + 1
        return float(array.sum())

    @endpoint
    def keep(self, array: Any) -> None:
        self.kept = array

    @endpoint
    def kept_sum(self) -> float:
        return float(self.kept.sum())

    @endpoint
    def make(self, size: int) -> Any:
        return numpy.full(size, current_rank().rank + 1, numpy.uint8)

    @endpoint
    def echo(self, x: Any) -> Any:
        return x

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def live_bytes(self) -> int:
        return current_node().bulk.segments.stats().live_bytes

    @endpoint
    def memory(self) -> int:
        gc.collect()
        return memory()

    @endpoint
    def change_after_answer(self) -> Any:
        self.kept = numpy.zeros(4 * MB, numpy.uint8)
        return self.kept

    @endpoint
    def touch(self) -> None:
        self.kept[:] = 9


class AsyncLarge(Large):
    @endpoint
    async def echo(self, x: Any) -> Any:
        return x


@pytest.fixture
def large(procs: Any) -> Any:
    return procs(2).spawn("large", Large)


def test_arrays_both_ways(large: Any) -> None:
    array = numpy.arange(8 * MB, dtype=numpy.float32)
    assert set(large.sum.call(array).get(timeout=30).values()) == {float(array.sum())}
    values = large.make.call(16 * MB).get(timeout=30)
    assert [int(value[0]) for value in values.values()] == [1, 2] and all(len(value) == 16 * MB for _, value in values)
    view = numpy.arange(2 * MB).reshape(2, -1).T[::2]
    assert numpy.array_equal(large.echo.call(view).get(timeout=30)[1], view)


@pytest.mark.parametrize("cls", [Large, AsyncLarge])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 3 * MB + 1])
def test_bytes_of_every_size(procs: Any, cls: type, size: int) -> None:
    actor = procs(1).spawn("large", cls).slice(gpus=0)
    for data in (os.urandom(size), bytearray(os.urandom(size))):
        back = actor.echo.call_one(data).get(timeout=30)
        assert type(back) is type(data) and back == data
        assert actor.digest.call_one(data).get(timeout=30) == hashlib.md5(data).hexdigest()


def test_torch_tensors(large: Any) -> None:
    import torch

    tensor = torch.arange(4 * MB, dtype=torch.int64)
    assert set(large.sum.call(tensor).get(timeout=30).values()) == {float(tensor.sum())}
    both = {"a": tensor, "b": tensor[10:20]}
    back = large.echo.call(both).get(timeout=30)[1]
    assert torch.equal(back["a"], tensor) and torch.equal(back["b"], tensor[10:20])
    back["a"][15] = -1
    assert int(back["b"][5]) == -1, "views of one storage stay views of one"
    assert large.write.call(torch.zeros(1000)).get(timeout=30)[1] == 2000
    parameter = torch.nn.Linear(300, 300).state_dict()
    got = large.echo.call(parameter).get(timeout=30)[0]
    assert all(torch.equal(got[name], parameter[name]) for name in parameter)


def test_arrow_tables(large: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"x": list(range(200_000)), "s": [f"row {index}" for index in range(200_000)]})
    assert large.echo.call(table).get(timeout=30)[1].equals(table)


def test_writes_to_an_argument_stay_private(large: Any) -> None:
    array = numpy.zeros(MB, numpy.float64)
    assert list(large.write.call(array).get(timeout=30).values()) == [MB, 2 * MB]
    assert array.sum() == 0
    future = large.keep.call(array)
    future.get(timeout=30)
    array[:] = 7
    assert list(large.kept_sum.call().get(timeout=30).values()) == [0, 0]
    large.keep.call(None).get(timeout=30)


def test_sent_values_are_snapshots(large: Any) -> None:
    array = numpy.zeros(MB, numpy.float64)
    futures = []
    for number in range(10):
        array[:] = number
        futures.append(large.sum.call(array))
    assert [future.get(timeout=30)[0] for future in futures] == [number * MB for number in range(10)]
    one = large.slice(gpus=0)
    result = one.change_after_answer.call_one().get(timeout=30)
    one.touch.call_one().get(timeout=30)
    assert result.sum() == 0
    result[:] = 1
    assert one.kept_sum.call_one().get(timeout=30) == 9 * 4 * MB
    one.keep.call_one(None).get(timeout=30)
    del result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numpy", "bytes", "torch"])
def test_middle_buffers_travel_beside_the_body(large: Any, kind: str) -> None:
    import torch

    size = (THRESHOLD + SHARED) // 2
    array = numpy.frombuffer(os.urandom(size), numpy.uint8).copy()
    value = {"numpy": array, "bytes": array.tobytes(), "torch": torch.from_numpy(array)}[kind]
    before = current_node().bulk.segments.stats().live
    back = large.echo.call(value).get(timeout=30)
    assert current_node().bulk.segments.stats().live == before
    assert large.live_bytes.call().get(timeout=30)[0] == 0
    assert all(type(each) is type(value) for each in back.values())
    assert all(bytes(each if kind == "bytes" else numpy.asarray(each)) == array.tobytes() for each in back.values())


def test_buffers_in_frames_are_private(large: Any) -> None:
    array = numpy.zeros(SHARED // 2, numpy.uint8)
    futures = [large.sum.call(array)]
    for value in range(1, 40):
        array[:] = value
        futures.append(large.sum.call(array))
    array[:] = 200
    sums = [set(future.get(timeout=30).values()) for future in futures]
    assert sums == [{float(value * len(array))} for value in range(40)], "what was sent is what it was then"
    assert list(large.write.call(array).get(timeout=30).values()) == [len(array), 2 * len(array)]
    assert array[0] == 200


@pytest.mark.slow
def test_memory_is_bounded(large: Any) -> None:
    def load() -> None:
        for _ in range(50):
            assert large.sum.call(numpy.ones(64 * MB, numpy.uint8)).get(timeout=60)[0] == 64 * MB
        for _ in range(10):
            large.make.call(64 * MB).get(timeout=60)

    large.sum.call(numpy.ones(1, numpy.uint8)).get(timeout=30)
    ours, theirs = memory(), max(large.memory.call().get(timeout=30).values())
    load()
    gc.collect()
    # Of what was sent (50 x 64 MB) a few are kept warm for the next.
    assert memory() - ours < 700 * MB
    assert max(large.memory.call().get(timeout=30).values()) - theirs < 400 * MB


def test_shared_memory_is_released_after_use(large: Any) -> None:
    for _ in range(20):
        large.echo.call(numpy.ones(MB, numpy.uint8)).get(timeout=30)
    gc.collect()
    assert wait_until(lambda: large.memory.call().get(timeout=30) and live_segments() == 0)


@pytest.mark.parametrize("kind", ["text", "array"])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_answers_outlive_their_rank(procs: Any, kind: str, end: str) -> None:
    mesh = procs(2)
    actors = mesh.spawn("large", Large)
    value = "x" * 3_000_000 if kind == "text" else numpy.ones(400_000)
    answer = actors.echo.call(value)
    assert wait_until(lambda: answer.done)
    if end == "stop":
        mesh.stop().get(30)
    else:
        os.kill(actors.slice(gpus=1).pid.call_one().get(30), signal.SIGKILL)
        with pytest.raises(SupervisionError):
            while True:
                actors.pid.call().get(30)
    assert [len(each) for each in answer.get(30).values()] == [len(value)] * 2


def test_interrupted_read_of_an_answer_loses_nothing(large: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = large.echo.call("x" * 3_000_000)
    assert wait_until(lambda: answer.done)
    usual = pickling.within

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(pickling, "within", usual)
        raise KeyboardInterrupt

    monkeypatch.setattr(pickling, "within", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer.get(30)
    # Nothing else holds its memory now.
    gc.collect()
    assert all(len(each) == 3_000_000 for each in answer.get(30).values())


def test_unheld_results_are_released(large: Any) -> None:
    results = large.make.call(4 * MB).get(timeout=20)
    one = large.slice(gpus=0)
    assert one.live_bytes.call_one().get(timeout=20) >= 4 * MB
    del results
    gc.collect()
    # Also a program that sends no other large value gives them back, in a while.
    assert wait_until(lambda: one.live_bytes.call_one().get(timeout=20) == 0)


def test_large_values_between_actors(procs: Any) -> None:
    class Passes(Actor):
        @endpoint
        def pass_on(self, other: Any, array: Any) -> float:
            return other.sum.call_one(array).get()

        @endpoint
        def fetch(self, other: Any, size: int) -> float:
            return float(other.make.call_one(size).get().sum())

    large = procs(1).spawn("large", Large).slice(gpus=0)
    passes = procs(1).spawn("passes", Passes)
    assert passes.pass_on.call_one(large, numpy.ones(8 * MB, numpy.uint8)).get(timeout=30) == 8 * MB
    assert passes.fetch.call_one(large, 8 * MB).get(timeout=30) == 8 * MB


def test_large_arguments_of_a_constructor_and_of_spawn(procs: Any) -> None:
    class Holds(Actor):
        def __init__(self, array: Any) -> None:
            self.array = array

        @endpoint
        def sum(self) -> float:
            return float(self.array.sum())

    holds = procs(2).spawn("holds", Holds, numpy.ones(4 * MB, numpy.uint8))
    assert list(holds.sum.call().get(timeout=30).values()) == [4 * MB] * 2
