"""Buffers: memory of one actor that others read and write, by each transport, and their errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch._state.rdma.plane import plane
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, ArgumentError, TransferError
from monarch.rdma import RDMAAction, RDMABuffer, get_rdma_backend, is_ibverbs_available, is_rdma_available

LARGE = 40_000_000
TRANSPORTS = ["attach", "stream", pytest.param("nixl", marks=pytest.mark.slow)]


class Owner(Actor):
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    @endpoint
    def make(self, *sizes: int) -> list[RDMABuffer]:
        new = [torch.arange(size, dtype=torch.float32) for size in sizes]
        self.tensors += new
        return [RDMABuffer(each) for each in new]

    @endpoint
    def make_bytes(self, size: int, readonly: bool) -> RDMABuffer:
        self.bytes = memoryview(bytes(size) if readonly else bytearray(size))
        return RDMABuffer(self.bytes)

    @endpoint
    def make_view(self) -> RDMABuffer:
        self.whole = torch.arange(100.0)
        return RDMABuffer(self.whole[10:20])

    @endpoint
    def content(self, index: int = 0) -> list[float]:
        return self.tensors[index][:8].tolist()

    @endpoint
    def busy_until(self, path: str) -> int:
        """Python code that never releases the GIL voluntarily."""
        rounds = 0
        while not os.path.exists(path):
            rounds += sum(range(100)) > 0
        return rounds

    @endpoint
    def drop_later(self, buffer: RDMABuffer) -> None:
        buffer.drop().get()
        self.tensors.clear()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class User(Actor):
    @endpoint
    def read(self, buffer: RDMABuffer, size: int) -> tuple[str, bool]:
        found = torch.zeros(size)
        buffer.read_into(found).get()
        return buffer.backend, bool((found == torch.arange(size, dtype=torch.float32)).all())

    @endpoint
    def write(self, buffer: RDMABuffer, values: list[float]) -> None:
        buffer.write_from(torch.tensor(values)).get()

    @endpoint
    def read_all(self, buffers: list[RDMABuffer]) -> list[float]:
        action, found = RDMAAction(), []
        for buffer in buffers:
            found.append(torch.zeros(buffer.size() // 4))
            action.read_remote(found[-1], buffer)
        action.submit().get()
        return [each.sum().item() for each in found]

    @endpoint
    def read_until_it_fails(self, buffer: RDMABuffer) -> str:
        found = torch.empty(buffer.size() // 4)
        while True:
            try:
                buffer.read_into(found).get()
            except TransferError as error:
                return str(error)

    @endpoint
    def transports(self, buffer: RDMABuffer) -> dict[str, str]:
        return buffer.transports()


@pytest.fixture
def sides(procs: Callable[..., Any]) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """An owner and a user in processes of their own, that have one transport."""

    def make(transport: str = "") -> tuple[Any, Any]:
        if transport == "nixl":
            pytest.importorskip("nixl")
        env = {"MONARCH_RDMA_TRANSPORTS": transport} if transport else {}
        return procs(1, name="owners", env=env).spawn("owner", Owner), procs(1, env=env).spawn("user", User)

    yield make


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffer_reads_and_writes(sides: Callable[..., Any], transport: str) -> None:
    owner, user = sides(transport)
    small, large = owner.make.call_one(1000, LARGE // 4).get()
    assert user.read.call_one(small, 1000).get(60) == (transport, True)
    assert user.read.call_one(large, LARGE // 4).get(60) == (transport, True)
    user.write.call_one(small, [5.0, 6.0]).get()
    assert owner.content.call_one().get()[:4] == [5.0, 6.0, 2.0, 3.0]
    user.write.call_one(large.part(8, 8), [7.0, 8.0]).get()
    assert owner.content.call_one(1).get()[:5] == [0.0, 1.0, 7.0, 8.0, 4.0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_transfers_at_once(sides: Callable[..., Any], transport: str) -> None:
    owner, user = sides(transport)
    sizes = [*range(1, 700), 2_000_000]
    buffers = owner.make.call_one(*sizes).get()
    assert user.read_all.call_one(buffers).get(60) == [sum(range(size)) for size in sizes[:-1]] + [
        torch.arange(sizes[-1], dtype=torch.float32).sum().item()
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_owner_may_be_busy(sides: Callable[..., Any], transport: str, tmp_path: Any) -> None:
    owner, user = sides(transport)
    (buffer,) = owner.make.call_one(LARGE // 4).get()
    done = tmp_path / "done"
    busy = owner.busy_until.call_one(str(done))
    assert user.read.call_one(buffer, LARGE // 4).get(60) == (transport, True)
    done.touch()
    assert busy.get(60) > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [16, LARGE // 4])
def test_dropped_buffer_is_an_error(sides: Callable[..., Any], transport: str, size: int) -> None:
    owner, user = sides(transport)
    first, second = owner.make.call_one(size, size).get()
    assert user.read.call_one(first, size).get(60)[1]
    first.drop().get()
    with pytest.raises(ActorError, match=r"the buffer of rank 0 of owners was dropped.*Nothing was written") as caught:
        user.read.call_one(first, size).get(60)
    assert isinstance(caught.value.exception, TransferError)
    # The other one still exists; it is dropped during a read.
    reading = user.read_until_it_fails.call_one(second)
    owner.drop_later.call_one(second).get()
    text = reading.get(60)
    assert "may be partly written" in text or "Nothing was written" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_owner_is_an_error(sides: Callable[..., Any], transport: str) -> None:
    owner, user = sides(transport)
    (buffer,) = owner.make.call_one(LARGE // 4).get()
    assert user.read.call_one(buffer, LARGE // 4).get(60)[1]
    reading = user.read_until_it_fails.call_one(buffer)
    os.kill(owner.pid.call_one().get(), signal.SIGKILL)
    text = reading.get(60)
    assert "rank 0 of owners" in text
    assert "may be partly written" in text or "Nothing was written" in text
    # A moment later the cause is known.
    with pytest.raises(ActorError, match="owners"):
        user.read.call_one(buffer, LARGE // 4).get(60)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_reader_is_harmless(sides: Callable[..., Any], transport: str, procs: Any) -> None:
    owner, user = sides(transport)
    (buffer,) = owner.make.call_one(LARGE // 4).get()
    env = {"MONARCH_RDMA_TRANSPORTS": transport}
    victim = procs(1, env=env).spawn("victim", Owner)
    reader = victim._state.procs
    assert user.read.call_one(buffer, LARGE // 4).get(60)[1]
    other = procs(1, env=env)
    reading = other.spawn("reader", User).read_until_it_fails.call_one(buffer)
    pid = other.spawn("pid", Owner).pid.call_one().get()
    os.kill(pid, signal.SIGKILL)
    assert reading.exception(30) is not None
    assert user.read.call_one(buffer, LARGE // 4).get(60)[1]
    assert reader is not None


def test_transfer_within_a_process(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    owner, user = mesh.spawn("owner", Owner), mesh.spawn("user", User)
    (buffer,) = owner.make.call_one(LARGE // 4).get()
    assert user.read.call_one(buffer, LARGE // 4).get(60) == ("local", True)
    user.write.call_one(buffer.part(4, 4), [9.0]).get()
    assert owner.content.call_one().get()[:3] == [0.0, 9.0, 2.0]
    buffer.drop().get()
    with pytest.raises(ActorError, match="was dropped"):
        user.read.call_one(buffer, LARGE // 4).get(60)


def test_program_reads_and_shares_buffers(procs: Callable[..., Any]) -> None:
    owner, user = procs(1).spawn("owner", Owner), procs(1).spawn("user", User)
    (buffer,) = owner.make.call_one(10).get()
    found = bytearray(40)
    buffer.read_into(found).get()
    assert memoryview(found).cast("f").tolist() == [float(each) for each in range(10)]
    buffer.write_from(memoryview(found)[:8]).get()
    mine = torch.arange(10, dtype=torch.float32)
    shared = RDMABuffer(mine)
    assert user.read.call_one(shared, 10).get() == ("attach", True)
    user.write.call_one(shared, [3.0]).get()
    assert mine[0].item() == 3.0
    assert shared.backend == "local" and shared.owner.count("/") == 1
    shared.drop().get()
    with pytest.raises(TransferError, match="the buffer of the program was dropped"):
        shared.read_into(torch.zeros(10)).get()


def test_memoryviews_and_views_are_buffers(procs: Callable[..., Any]) -> None:
    owner = procs(1).spawn("owner", Owner)
    plain = owner.make_bytes.call_one(100, False).get()
    plain.write_from(b"abc").get()
    found = bytearray(100)
    plain.read_into(found).get()
    assert found[:4] == b"abc\0"
    fixed = owner.make_bytes.call_one(100, True).get()
    fixed.read_into(found).get()
    with pytest.raises(
        ArgumentError, match="the buffer is read-only, because its owner made it from a read-only memoryview"
    ):
        fixed.write_from(b"abc")
    view = owner.make_view.call_one().get()
    part = torch.zeros(20)[5:15]
    view.read_into(part).get()
    assert part.tolist() == [float(each) for each in range(10, 20)]


def test_read_can_be_awaited(procs: Callable[..., Any]) -> None:
    import asyncio

    owner = procs(1).spawn("owner", Owner)
    buffers = owner.make.call_one(16, LARGE // 4).get()

    async def read() -> list[float]:
        found = [torch.zeros(16), torch.zeros(LARGE // 4)]
        reads = [buffer.read_into(each) for buffer, each in zip(buffers, found, strict=True)]
        await asyncio.gather(*(each.as_asyncio() for each in reads))
        return [each[-1].item() for each in found]

    assert asyncio.run(read()) == [15.0, LARGE // 4 - 1.0]


def test_buffer_ends_with_its_actor(procs: Callable[..., Any]) -> None:
    mesh = procs(1, name="place")
    owner = mesh.spawn("owner", Owner)
    (buffer,) = owner.make.call_one(10).get()
    buffer.read_into(torch.zeros(10)).get()
    owner.stop().get(30)
    with pytest.raises(TransferError, match="the buffer of rank 0 of place was dropped, or its actor was stopped"):
        buffer.read_into(torch.zeros(10)).get()


def test_bounds_and_types_are_checked(procs: Callable[..., Any]) -> None:
    (buffer,) = procs(1).spawn("owner", Owner).make.call_one(10).get()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: buffer.read_into(torch.zeros(9)), "the destination has 36 bytes, but the buffer has 40"),
        (lambda: buffer.write_from(torch.zeros(11)), "the source has 44 bytes, but the buffer only 40"),
        (lambda: buffer.read_into(torch.zeros(10, dtype=torch.int32)), "has dtype int32, the buffer float32"),
        (lambda: buffer.write_from(torch.zeros(5, dtype=torch.float64)), "has dtype float64, the buffer float32"),
        (lambda: buffer.read_into(torch.zeros(10, 2)), "contiguous and one-dimensional.*view"),
        (lambda: buffer.read_into(torch.zeros(20)[::2]), "not contiguous"),
        (lambda: buffer.read_into(bytes(40)), "bytes, which is read-only"),
        (lambda: buffer.read_into(memoryview(bytes(40))), "read-only memoryview"),
        (lambda: buffer.read_into([0.0] * 10), "expected a tensor or a memoryview, got list"),
        (lambda: buffer.read_into(torch.zeros(10), timeout=0), "timeout: expected seconds above 0"),
        (lambda: buffer.part(36, 8), "bytes 36 to 44 are outside the buffer of 40 bytes"),
        (lambda: buffer.part(-1, 8), "outside the buffer"),
        (lambda: RDMABuffer(torch.zeros(0)), "is empty"),
        (lambda: RDMABuffer(torch.zeros(2, 2)), "must be contiguous and one-dimensional"),
        (lambda: RDMABuffer(torch.zeros(2).to_sparse()), "plain tensor"),
        (lambda: RDMABuffer(7), "expected a tensor or a memoryview, got int"),
    ]
    for call, text in wrong:
        with pytest.raises(ArgumentError, match=text) as caught:
            call()
        assert isinstance(caught.value, ValueError)
    # Nothing has moved.
    found = torch.full((10,), -1.0)
    buffer.read_into(found).get()
    assert found.tolist() == [float(each) for each in range(10)]
    # Bytes match any dtype.
    buffer.read_into(torch.zeros(40, dtype=torch.uint8)).get()


def test_actions_reject_overlapping_memory(procs: Callable[..., Any]) -> None:
    first, second = procs(1).spawn("owner", Owner).make.call_one(10, 10).get()
    here = torch.zeros(30)
    # Programs may name the arguments, as for torchmonarch.
    action = RDMAAction().read_remote(src=first, dst=here[:10])
    for add in (
        lambda: action.read_remote(here[9:19], second),
        lambda: action.write_remote(second, here[5:9]),
    ):
        with pytest.raises(ArgumentError, match="overlaps"):
            add()
    action.read_remote(here[10:20], second).write_remote(dst=first, src=here[20:30])
    assert len(action) == 3
    # Reads come before writes, and it can be submitted again.
    action.submit().get()
    assert here[:20].tolist() == [*map(float, range(10)), *map(float, range(10))]
    action.submit().get()
    assert here[:10].tolist() == [0.0] * 10


def test_transport_choice_is_explained(sides: Callable[..., Any]) -> None:
    owner, user = sides()
    (buffer,) = owner.make.call_one(10).get()
    assert user.transports.call_one(buffer).get() == {"local": "the owner is another process", "attach": ""}
    assert buffer.device == "cpu" and buffer.dtype == "float32" and buffer.size() == 40 == buffer.size
    assert "40 bytes of float32 on cpu of rank 0 of owners" in repr(buffer)


def test_unknown_transport_is_rejected(procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (buffer,) = procs(1).spawn("owner", Owner).make.call_one(10).get()
    monkeypatch.setenv("MONARCH_RDMA_TRANSPORTS", "local,cuda_ipc")
    with pytest.raises(TransferError, match=r"no transport reaches .*local: the owner is another process; cuda_ipc:"):
        buffer.read_into(torch.zeros(10)).get()
    monkeypatch.setenv("MONARCH_RDMA_TRANSPORTS", "carrier-pigeon")
    with pytest.raises(ArgumentError, match="unknown transport 'carrier-pigeon'; expected any of local, attach"):
        buffer.read_into(torch.zeros(10)).get()


def test_stream_rejects_peers_without_the_secret() -> None:
    from monarch._tensors.memory.registry import Registry
    from monarch._tensors.memory.views import memory_of
    from monarch._tensors.transports.base import Move
    from monarch._tensors.transports.stream import StreamTransport
    from monarch._tensors.transports.stream_server import StreamServer

    registry = Registry()
    data = torch.arange(10.0)
    remote = registry.add(memory_of(data, "it"), "host/owner", "the owner")
    server = StreamServer(registry, b"right", "127.0.0.1")
    try:
        found = memory_of(torch.zeros(10), "there")
        stranger = StreamTransport(b"wrong", lambda proc, timeout: server.address)
        with pytest.raises(TransferError, match="rejects this process, which is not in its session"):
            stranger.move([Move(remote, found)], False, 5.0)
        friend = StreamTransport(b"right", lambda proc, timeout: server.address)
        friend.move([Move(remote, found)], False, 5.0)
        assert found.keep.tolist() == data.tolist()
        friend.close()
    finally:
        server.close()


def test_program_may_query_rdma_backends() -> None:
    assert is_rdma_available() is True
    assert get_rdma_backend() in ("ibverbs", "nixl", "tcp")
    assert is_ibverbs_available() in (True, False)


def test_handles_are_small(procs: Callable[..., Any]) -> None:
    import pickle

    (buffer,) = procs(1).spawn("owner", Owner).make.call_one(1000).get()
    assert len(pickle.dumps(buffer)) < 400


def test_transfer_timeout_is_an_error(procs: Callable[..., Any], tmp_path: Any) -> None:
    mesh = procs(1, env={"MONARCH_RDMA_TRANSPORTS": "stream"})
    owner = mesh.spawn("owner", Owner)
    (buffer,) = owner.make.call_one(10).get()
    pid = owner.pid.call_one().get()
    user = procs(1, env={"MONARCH_RDMA_TRANSPORTS": "stream"}).spawn("user", User)
    assert user.read.call_one(buffer, 10).get(60)[1]
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MONARCH_RDMA_TRANSPORTS", "stream")
            with pytest.raises(TransferError, match=r"did not answer for 0\.3 s"):
                buffer.read_into(torch.zeros(10), timeout=0.3).get(30)
        assert time.monotonic() - begun < 20
    finally:
        os.kill(pid, signal.SIGCONT)


def test_transport_chosen_during_a_death_is_kept(host: Any) -> None:
    """A thread chooses a transport while the receiving thread forgets those of a dead process."""
    transfers = plane()
    chosen, transport = transfers._chosen, next(iter(transfers._transports.values()))

    class Proc(str):
        """The id of a process; another thread runs whenever it is compared."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            chosen[f"h/{len(chosen)}", "cpu", b"", "cpu"] = transport
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            return not self == other

    before = dict(chosen)
    chosen[Proc("h/dead"), "cpu", b"", "cpu"] = transport
    transfers._forget("h/dead")
    assert transfers._chosen is chosen
    assert [proc for proc, *_ in chosen if proc not in {proc for proc, *_ in before}] == [f"h/{len(before) + 1}"]
    chosen.clear()
    chosen.update(before)


def test_death_waits_for_no_transfer(host: Any) -> None:
    """The receiving thread hears of it, and others hold the lock of NIXL while they register memory."""
    transfers = plane()
    forgotten = threading.Event()

    def forget(proc: str) -> None:
        if proc == "h/dead":
            forgotten.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers._stream, "forget", forget)
        hears = threading.Thread(target=transfers._forget, args=("h/dead",))
        with transfers._nixl._lock:
            hears.start()
            hears.join(10)
            assert not hears.is_alive()
        assert forgotten.wait(10)
