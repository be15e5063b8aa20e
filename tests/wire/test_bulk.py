"""Bulk data through shared memory: between processes, and the pool of segments by itself."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._wire.bulk.mappings import Mappings
from monarch._wire.bulk.segments import ALIGNMENT, HEADER, BulkRef, Segments, SegmentStats
from monarch._wire.pickling import dumps, loads
from monarch.exceptions import SupervisionError

ALL_FREE = SegmentStats(0, 0, 0, 0)

# Runs the functions sent to it, one after the other, with a dict to keep objects between them.
OTHER_PROCESS = """
import pickle, sys
kept = {}
while True:
    function, arguments = pickle.load(sys.stdin.buffer)
    try:
        result = True, function(kept, *arguments)
    except Exception as error:
        result = False, error
    pickle.dump(result, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


class Process:
    """Another process of this user."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self.process.pid

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(cloudpickle.dumps((function, arguments)))
        self.process.stdin.flush()
        done, result = pickle.load(self.process.stdout)
        if not done:
            raise result
        return result

    def kill(self, wait: bool = True) -> None:
        self.process.send_signal(signal.SIGKILL)
        if wait:
            self.process.communicate()


cloudpickle.register_pickle_by_value(sys.modules[__name__])


def receive(kept: dict, name: str, body: bytes, ref: list) -> None:
    """In the other process: opens and keeps."""
    if "mappings" not in kept:
        kept["released"] = deque()
        kept["mappings"] = Mappings(kept["released"].append)
    kept[name] = loads(body, kept["mappings"].open(BulkRef(*ref)))


def own(kept: dict, obj: Any) -> tuple[bytes, list]:
    kept["segments"] = Segments()
    body, buffers = dumps(obj)
    return body, list(kept["segments"].put(buffers, ["test"]))


def total(kept: dict, name: str) -> float:
    return float(kept[name].sum())


def write(kept: dict, name: str) -> None:
    kept[name] += 1


def drop(kept: dict, name: str) -> list:
    del kept[name]
    released = list(kept["released"])
    kept["released"].clear()
    return released


def count_of_fds(kept: dict) -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def others() -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def start() -> Process:
        started.append(Process())
        return started[-1]

    yield start
    for process in started:
        process.kill()


def left_over() -> tuple[int, int, list[str]]:
    named = [name for name in os.listdir("/dev/shm") if "monarch" in name]
    return len(os.listdir("/proc/self/fd")), maps_of_segments(), named


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = left_over()
    yield
    gc.collect()
    assert left_over() == before


def maps_of_segments(pid: int | str = "self") -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:monarch")


@pytest.fixture
def segments(nothing_left: None) -> Iterator[Segments]:
    made = Segments()
    yield made
    made.close()


def data(size: int, seed: int = 0) -> memoryview:
    return memoryview(random.Random(seed).randbytes(size))


# Between processes


def test_many_receivers_share_one_copy(segments: Segments, others: Callable[[], Process]) -> None:
    receivers = [others() for _ in range(3)]
    array = np.arange(1 << 20, dtype=np.float64)
    for again in range(3):  # fresh, reused and mapped
        array[0] = again
        body, buffers = dumps(array)
        ref = segments.put(buffers, [str(process.pid) for process in receivers])
        for process in receivers:
            process.do(receive, "x", body, list(ref))
        receivers[0].do(write, "x")
        assert [process.do(total, "x") for process in receivers] == [array.sum() + array.size, *[array.sum()] * 2]
        for left, process in reversed(list(enumerate(receivers))):
            assert process.do(drop, "x") == [(os.getpid(), ref.segment)]
            assert segments.stats().live == 1
            segments.release(ref.segment, str(process.pid))
            assert segments.stats().live == bool(left)
    assert segments.stats().idle == 1
    assert os.readlink(f"/proc/self/fd/{ref.fd}") == "/memfd:monarch (deleted)"  # so it has no name anywhere
    assert [maps_of_segments(process.pid) for process in receivers] == [0, 0, 0]


def test_mapping_takes_no_file_descriptor(segments: Segments, others: Callable[[], Process]) -> None:
    process = others()
    process.do(receive, "0", *small(segments, "0"))
    before = process.do(count_of_fds)
    for number in range(1, 20):
        process.do(receive, str(number), *small(segments, str(number)))
    assert process.do(count_of_fds) == before
    assert maps_of_segments(process.pid) == 20
    assert process.do(total, "7") == 7e5


def small(segments: Segments, name: str) -> tuple[bytes, list]:
    body, buffers = dumps(np.full(100_000, float(name)))
    return body, list(segments.put(buffers, ["it"]))


def test_dead_receiver_leaks_nothing(segments: Segments, others: Callable[[], Process]) -> None:
    dies, lives = others(), others()
    body, buffers = dumps(np.ones(100_000))
    refs = [segments.put(buffers, ["dies", "lives"]), segments.put(buffers, ["dies"])]
    for process in (dies, lives):
        process.do(receive, "x", body, list(refs[0]))
    dies.kill()
    segments.forget("dies")
    assert segments.stats()[1::2] == (1, 1)
    segments.release(refs[0].segment, "dies")
    segments.release(refs[0].segment, "lives")
    assert segments.stats()[1::2] == (0, 2)


def test_mappings_outlive_their_owner(others: Callable[[], Process]) -> None:
    owner, receiver = others(), others()
    body, ref = owner.do(own, np.ones(100_000))
    receiver.do(receive, "x", body, ref)
    owner.kill()
    receiver.do(write, "x")
    assert receiver.do(total, "x") == 2e5
    assert receiver.do(drop, "x") == [(owner.pid, ref[2])]


@pytest.mark.parametrize("reaped", [True, False])
def test_data_of_dead_owner_is_an_error(others: Callable[[], Process], reaped: bool) -> None:
    owner = others()
    _, ref = owner.do(own, np.ones(100_000))
    owner.kill(wait=reaped)
    while not reaped and " Z " not in Path(f"/proc/{owner.pid}/stat").read_text():
        time.sleep(0.001)
    released: list[tuple[int, int]] = []
    with pytest.raises(SupervisionError, match=f"process {owner.pid} is gone"):
        Mappings(released.append).open(ref)
    assert released == [(owner.pid, ref[2])]


def test_tensors_arrive_in_another_process(segments: Segments, others: Callable[[], Process]) -> None:
    process = others()
    base = torch.ones(100_000)
    body, buffers = dumps({"a": base, "b": base[:60_000]})
    ref = segments.put(buffers, ["it"])
    assert len(ref.spans) == 1
    process.do(receive, "x", body, list(ref))

    def only_a_view(kept: dict) -> tuple[float, int]:
        kept["x"]["b"].zero_()
        kept["x"] = kept["x"]["a"][10:]
        return float(kept["x"].sum()), len(kept["released"])

    assert process.do(only_a_view) == (40_000, 0)
    assert process.do(drop, "x") == [(os.getpid(), ref.segment)]
    assert float(base.sum()) == 100_000


# One process by itself


def test_spans_are_aligned_and_empty_ones_allowed(segments: Segments) -> None:
    buffers = [data(70_001), memoryview(b""), data(3, 1)]
    ref = segments.put(buffers, ["it"])
    assert [length for _, length in ref.spans] == [70_001, 0, 3]
    assert all(offset % ALIGNMENT == 0 and offset >= HEADER for offset, _ in ref.spans)
    opened = Mappings(lambda key: None).open(ref)
    assert opened == buffers
    assert not any(buffer.readonly for buffer in opened)
    assert Mappings(lambda key: None).open(segments.put([], ["it"])) == []


def test_released_reference_is_rejected(segments: Segments) -> None:
    released: list[tuple[int, int]] = []
    mappings = Mappings(released.append)
    stale = segments.put([data(100_000)], ["it"])
    segments.release(stale.segment, "it")
    with pytest.raises(SupervisionError, match="is gone"):
        mappings.open(stale)
    fresh = segments.put([data(100_000, 1)], ["it"])
    assert fresh.fd == stale.fd
    with pytest.raises(SupervisionError, match="is gone"):
        mappings.open(stale)
    segments.release(stale.segment, "it")
    assert mappings.open(fresh) == [data(100_000, 1)]
    assert len(released) == 3


def test_file_that_is_not_a_segment_is_rejected(segments: Segments) -> None:
    ref = segments.put([data(10)], ["it"])
    mappings = Mappings(lambda key: None)
    reader, writer = os.pipe()
    with open("/etc/hostname") as file:
        for fd in (reader, writer, file.fileno(), 9999):
            with pytest.raises(SupervisionError, match="is gone"):
                mappings.open(ref._replace(fd=fd))
    with pytest.raises(SupervisionError, match="is gone"):
        mappings.open(ref._replace(spans=((64, 1 << 40),)))
    os.close(reader)
    os.close(writer)


def test_receiver_named_twice_may_open_twice(segments: Segments) -> None:
    released: list[tuple[int, int]] = []
    mappings = Mappings(released.append)
    ref = segments.put([data(100_000)], ["it", "it"])
    one, other = mappings.open(ref), mappings.open(ref)
    one[0][0] ^= 1
    assert other == [data(100_000)]
    del one
    segments.release(released.pop()[1], "it")
    assert segments.stats().live == 1
    del other
    segments.release(released.pop()[1], "it")
    assert segments.stats().live == 0


def test_bulk_data_needs_receiver(segments: Segments) -> None:
    with pytest.raises(ValueError, match="receivers: expected at least one"):
        segments.put([data(10)], [])


def test_live_bytes_above_limit_are_reported() -> None:
    segments = Segments(live_limit=1 << 20)
    ref = segments.put([data(700_000)], ["it"])
    assert not segments.over_limit
    segments.put([data(700_000)], ["other"])
    assert segments.over_limit
    segments.release(ref.segment, "it")
    assert not segments.over_limit
    segments.close()
    assert segments.stats() == ALL_FREE


def test_lack_of_descriptors_first_frees_idle_segments() -> None:
    segments = Segments()
    mappings = Mappings(lambda key: None)
    held = segments.put([data(10)], ["it"])
    idle = [segments.put([data(10)], ["it"]) for _ in range(5)]
    for ref in idle:
        segments.release(ref.segment, "it")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    filler: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many"):
            while True:
                filler.append(os.dup(0))
        # Too large for the idle ones, which are freed for it.
        large = segments.put([data(1 << 20)], ["it"])
        assert segments.stats().idle == 0
        for _ in range(4):
            segments.put([data(10)], ["it"])
        with pytest.raises(MemoryError, match=r"in 6 segments, .* raise ulimit -n"):
            segments.put([data(10)], ["it"])
        with pytest.raises(MemoryError, match="cannot open bulk data"):
            mappings.open(held)
    finally:
        for fd in filler:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert mappings.open(large) == [data(1 << 20)]
    segments.close()


def test_lack_of_memory_is_an_error(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_memory)
        with pytest.raises(MemoryError, match="cannot put 1 MiB into shared memory: No space left"):
            segments.put([data(1 << 20)], ["it"])
    assert segments.stats() == ALL_FREE
    ref = segments.put([data(64 << 20)], ["it"])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), hard))
    try:
        with pytest.raises(MemoryError, match=f"cannot map 64 MiB of process {os.getpid()}: Cannot allocate"):
            Mappings(lambda key: None).open(ref)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_threads_put_and_release_at_once(segments: Segments) -> None:
    released: deque[tuple[int, int]] = deque()
    mappings = Mappings(released.append)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for turn in range(60):
            size = rng.choice([1, 70_000, 300_000])
            sent = np.full(size, (seed * 60 + turn) % 251, np.uint8)
            opened = mappings.open(segments.put([sent.data], ["it"]))
            time.sleep(0)
            if not np.array_equal(np.frombuffer(opened[0], np.uint8), sent):
                wrong.append(turn)
            del opened
            while released:
                try:
                    segments.release(released.popleft()[1], "it")
                except IndexError:
                    break

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert segments.stats().live == 0


# The pool, by chance

RECEIVERS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)
SIZES = st.lists(st.sampled_from([0, 1, 5000, 65_536, 200_000, 400_000, 600_000]), max_size=3)
STEPS = st.lists(
    st.tuples(st.just("put"), SIZES, RECEIVERS)
    | st.tuples(st.just("release"), st.integers(0, 9), st.sampled_from("abc"))
    | st.tuples(st.just("forget"), st.just(0), st.sampled_from("abc")),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([0, 300_000, 1 << 20, 1 << 30]))
def test_held_segment_is_not_reused(steps: list[tuple[str, Any, Any]], idle_limit: int) -> None:
    segments = Segments(idle_limit)
    mappings = Mappings(lambda key: None)
    held: dict[int, tuple[BulkRef, list[str], list[memoryview], list[memoryview]]] = {}
    numbers: set[int] = set()
    fds_before = len(os.listdir("/proc/self/fd"))
    for turn, (action, what, who) in enumerate(steps):
        if action == "put":
            buffers = [memoryview(bytes([turn + 1]) * size) for size in what]
            ref = segments.put(buffers, iter(who))
            assert ref.fd not in {other.fd for other, *_ in held.values()}
            assert ref.segment not in numbers
            numbers.add(ref.segment)
            held[ref.segment] = ref, list(who), buffers, mappings.open(ref)
        elif action == "release":
            number = sorted(numbers)[what] if what < len(numbers) else what
            segments.release(number, who)
            if number in held and who in held[number][1]:
                held[number][1].remove(who)
        else:
            segments.forget(who)
            for _, waiting, *_ in held.values():
                waiting[:] = [receiver for receiver in waiting if receiver != who]
        held = {number: entry for number, entry in held.items() if entry[1]}
        for _, _, buffers, opened in held.values():
            assert opened == buffers
        stats = segments.stats()
        assert stats.idle_bytes <= idle_limit
        assert stats.live == len(held)
        assert stats.live_bytes >= sum(length for ref, *_ in held.values() for _, length in ref.spans)
        assert len(os.listdir("/proc/self/fd")) - fds_before == stats.live + stats.idle
    segments.close()
    assert segments.stats() == ALL_FREE
    assert len(os.listdir("/proc/self/fd")) == fds_before


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_released_segment_is_reused_for_its_size(lengths: list[int]) -> None:
    segments = Segments()
    for length in lengths:
        fds = set()
        for seed in range(3):
            ref = segments.put([data(length, seed)], ["it"])
            fds.add(ref.fd)
            assert Mappings(lambda key: None).open(ref) == [data(length, seed)]
            segments.release(ref.segment, "it")
        assert len(fds) == 1
    segments.close()
