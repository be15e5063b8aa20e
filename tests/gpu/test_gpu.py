"""Ranks with GPUs: which one each has, buffers and messages by CUDA IPC, and NCCL."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from leaks import Kit, wait_until
from monarch._meshes.actors.ask import ask
from monarch._procs.os.gpus import has_touched_gpus
from monarch._state.rdma import exports
from monarch._state.rdma.buffer import submit
from monarch._tensors.memory.views import memory_of
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import copy_state, device_mesh, group
from monarch.exceptions import ActorError, TransferError
from monarch.rdma import RDMABuffer

COUNT = 8_000_000


class Rank(Actor):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    @endpoint
    def device(self) -> tuple[str, int, int]:
        """Return the GPUs that it sees, their number, and its current device, which is chosen when CUDA begins."""
        torch.ones(1, device="cuda")
        return os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count(), torch.cuda.current_device()

    @endpoint
    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    @endpoint
    def share(self, device: str) -> RDMABuffer:
        self.kept.append(torch.arange(COUNT, dtype=torch.float32, device=device))
        return RDMABuffer(self.kept[-1])

    @endpoint
    def read(self, buffer: RDMABuffer, device: str) -> tuple[str, bool, dict[str, str]]:
        found = torch.zeros(COUNT, device=device)
        buffer.read_into(found).get()
        right = bool((found.cpu() == torch.arange(COUNT, dtype=torch.float32)).all())
        return buffer.backend, right, buffer.transports()

    @endpoint
    def write(self, buffer: RDMABuffer, device: str) -> None:
        buffer.write_from(torch.full((4,), 7.0, device=device)).get()

    @endpoint
    def first(self) -> list[float]:
        return self.kept[-1][:6].tolist()

    @endpoint
    def give(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32, device="cuda")

    @endpoint
    def total(self, tensor: torch.Tensor) -> tuple[float, str]:
        return tensor.double().sum().item(), tensor.device.type

    @endpoint
    def pass_on(self, other: Any, count: int) -> list[Any]:
        """A tensor of this rank's GPU to the others, and their answers back."""
        answer = other.double.call(torch.arange(count, dtype=torch.float32, device="cuda")).get()
        return [(each.sum().item(), each.device.type) for each in answer.values()]

    @endpoint
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @endpoint
    def allocated(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    @endpoint
    def reduce(self) -> tuple[float, str, str]:
        import torch.distributed as dist

        here = torch.full((3,), current_rank().rank + 1.0, device="cuda")
        dist.all_reduce(here, group=group())
        backend = dist.get_backend_config(group())
        return here[0].item(), str(backend), device_mesh().device_type

    @endpoint
    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": self.kept[-1]}

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def share_beside_work(self) -> tuple[RDMABuffer, bool]:
        """Share while another stream computes for seconds; whether that still went on afterwards."""
        self.kept.append(torch.arange(COUNT, dtype=torch.float32, device="cuda"))
        busy = torch.cuda.Stream()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(int(2e10))
        buffer = RDMABuffer(self.kept[-1])
        return buffer, not busy.query()

    @endpoint
    def share_matrix(self, rows: int, columns: int) -> RDMABuffer:
        self.kept.append(torch.arange(rows * columns, dtype=torch.float32, device="cuda"))
        return RDMABuffer(self.kept[-1])

    @endpoint
    def read_columns(self, buffer: RDMABuffer, rows: int, columns: int, device: str) -> torch.Tensor:
        """The second half of the columns of another rank's matrix."""
        half = columns // 2
        found = torch.zeros(rows * half, device=device)
        spans = numpy.array([[4 * (row * columns + half), 4 * row * half, 4 * half] for row in range(rows)])
        whole = buffer.reading(torch.zeros(rows * columns, device=device))
        submit([whole._replace(local=memory_of(found, "the columns"), spans=spans)], [], 60).get()
        return found.view(rows, half).cpu()

    @endpoint
    def forget_all(self) -> int:
        """Give all memory back to the GPU; return how much of it is free."""
        self.kept.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    @endpoint
    def keeps_format(self, tensor: torch.Tensor) -> tuple[bool, str]:
        return tensor.is_contiguous(memory_format=torch.channels_last), tensor.device.type

    @endpoint
    def pass_image(self, other: Any) -> tuple[bool, str]:
        image = torch.arange(120.0, device="cuda").view(2, 3, 4, 5).to(memory_format=torch.channels_last)
        return other.keeps_format.call_one(image).get()


def values(future: Any) -> list[Any]:
    return list(future.get(120).values())


def test_nobody_has_touched_a_gpu_before_it_forks(procs: Callable[..., Any]) -> None:
    """Neither the zygote nor its successor; a rank that asks for one has."""
    ranks = procs(1).spawn("rank", Rank)
    ranks.device.call_one().get(120)
    rank = ranks.pid.call_one().get(60)
    agent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert has_touched_gpus(rank)

    def zygotes() -> list[int]:
        found = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text() == "monarch-zygote\n"]

    # A successor is not the leader of its session. Those of other sessions have their turn before, of 7 s each.
    assert wait_until(lambda: [pid for pid in zygotes() if os.getsid(pid) != pid], 60)
    assert not any(map(has_touched_gpus, [agent, *zygotes()]))
    assert procs(1).spawn("late", Rank).device.call_one().get(120)[1] == torch.cuda.device_count()


def test_each_rank_sees_all_gpus_and_begins_with_its_own(procs: Callable[..., Any]) -> None:
    ranks = procs(2).spawn("ranks", Rank)
    there = torch.cuda.device_count()
    assert [seen[1:] for seen in values(ranks.device.call())] == [(there, 0), (there, 1 % there)]
    # A second actor of a rank has a thread of its own, with the same GPU.
    second = procs(2).spawn("first", Rank)
    assert len(set(values(second.uuid.call()))) == min(2, there)


def test_a_second_actor_of_a_rank_has_the_same_gpu(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    first, second = mesh.spawn("first", Rank), mesh.spawn("second", Rank)
    assert values(first.uuid.call()) == values(second.uuid.call())


def test_an_isolated_rank_sees_one_gpu(procs: Callable[..., Any]) -> None:
    ranks = procs(2, env={"MONARCH_ISOLATE_GPUS": "1"}).spawn("ranks", Rank)
    assert [seen[1:] for seen in values(ranks.device.call())] == [(1, 0), (1, 0)]
    assert len(set(values(ranks.uuid.call()))) == min(2, torch.cuda.device_count())


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_two_meshes_use_different_gpus(procs: Callable[..., Any]) -> None:
    meshes = [procs(2).spawn(name, Rank) for name in ("first", "second")]
    assert len({uuid for mesh in meshes for uuid in values(mesh.uuid.call())}) == 4


def test_nccl_is_chosen_for_ranks_with_gpus_of_their_own(procs: Callable[..., Any]) -> None:
    ranks = procs(min(2, torch.cuda.device_count())).spawn("ranks", Rank)
    for _, backend, kind in values(ranks.reduce.call()):
        assert "nccl" in backend and kind == "cuda"


@pytest.mark.parametrize("owner", ["cuda", "cpu"])
@pytest.mark.parametrize("reader", ["cuda", "cpu"])
def test_buffers(procs: Callable[..., Any], owner: str, reader: str) -> None:
    first, second = procs(1).spawn("first", Rank), procs(1).spawn("second", Rank)
    buffer = first.share.call_one(owner).get(120)
    backend, right, reasons = second.read.call_one(buffer, reader).get(120)
    assert right, reasons
    if owner == "cuda":
        assert backend == "cuda_ipc", reasons
    second.write.call_one(buffer.part(8, 16), reader).get(120)
    assert first.first.call_one().get(120) == [0.0, 1.0, 7.0, 7.0, 7.0, 7.0]


def test_sharing_does_not_wait_for_other_streams(procs: Callable[..., Any]) -> None:
    owner, reader = procs(1).spawn("owner", Rank), procs(1).spawn("reader", Rank)
    buffer, was_busy = owner.share_beside_work.call_one().get(120)
    assert was_busy
    assert reader.read.call_one(buffer, "cuda").get(120)[1]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_columns_of_a_matrix(procs: Callable[..., Any], device: str) -> None:
    owner, reader = procs(1).spawn("owner", Rank), procs(1).spawn("reader", Rank)
    buffer = owner.share_matrix.call_one(300, 64).get(120)
    found = reader.read_columns.call_one(buffer, 300, 64, device).get(120)
    assert torch.equal(found, torch.arange(300.0 * 64).view(300, 64)[:, 32:])


def test_memory_of_dropped_buffers_is_free_for_others(procs: Callable[..., Any]) -> None:
    owner, reader = procs(1).spawn("owner", Rank), procs(1).spawn("reader", Rank)
    # A reader keeps what it has mapped until it maps the next memory.
    small = owner.share.call_one("cuda").get(120)
    assert reader.read.call_one(small, "cuda").get(120)[1]
    free: list[int] = []
    for _ in range(6):
        buffer = owner.share.call_one("cuda").get(120)
        assert reader.read.call_one(buffer, "cuda").get(120)[1]
        buffer.drop().get(60)
        free.append(owner.forget_all.call_one().get(120))
    assert free[-1] >= free[1] - 4 * COUNT, free


def test_messages_keep_channels_last(procs: Callable[..., Any]) -> None:
    one, other = procs(1).spawn("one", Rank), procs(1).spawn("other", Rank)
    assert one.pass_image.call_one(other).get(120) == (True, "cuda")


def test_a_program_reads_from_a_gpu(procs: Callable[..., Any], leaks: Kit) -> None:
    buffer = procs(1).spawn("owner", Rank).share.call_one("cuda").get(120)
    found = torch.zeros(COUNT)
    buffer.read_into(found).get(60)
    assert found[-1].item() == COUNT - 1
    # From now on, this process has the GPU open.
    leaks.rebase()


def test_dropped_and_dead(procs: Callable[..., Any]) -> None:
    owner, user = procs(1).spawn("owner", Rank), procs(1).spawn("user", Rank)
    buffer, other = owner.share.call_one("cuda").get(120), owner.share.call_one("cuda").get(120)
    assert user.read.call_one(buffer, "cuda").get(120)[1]
    buffer.drop().get(60)
    with pytest.raises(ActorError, match="was dropped") as caught:
        user.read.call_one(buffer, "cuda").get(120)
    assert isinstance(caught.value.exception, TransferError)
    os.kill(owner.pid.call_one().get(60), signal.SIGKILL)
    with pytest.raises(ActorError):
        user.read.call_one(other, "cuda").get(120)


def test_messages_between_ranks(procs: Callable[..., Any]) -> None:
    one, others = procs(1).spawn("one", Rank), procs(2).spawn("others", Rank)
    expected = 2.0 * sum(range(1000))
    assert one.pass_on.call_one(others, 1000).get(120) == [(expected, "cuda")] * 2


def test_memory_is_freed_when_the_last_reader_is_done(procs: Callable[..., Any]) -> None:
    one, others = procs(1).spawn("one", Rank), procs(2).spawn("others", Rank)
    one.pass_on.call_one(others, 1000).get(120)
    before = one.allocated.call_one().get(60), values(others.allocated.call())
    for _ in range(3):
        one.pass_on.call_one(others, COUNT).get(120)
    assert wait_until(lambda: ask(one, exports.count).get(10)[0] == 0)
    assert wait_until(lambda: (one.allocated.call_one().get(60), values(others.allocated.call())) == before)


def test_a_program_sends_and_gets(procs: Callable[..., Any]) -> None:
    rank = procs(1).spawn("rank", Rank)
    assert rank.total.call_one(torch.arange(10.0)).get(120) == (45.0, "cpu")
    assert rank.give.call_one(10).get(120).tolist() == [float(each) for each in range(10)]


def test_states_on_gpus(procs: Callable[..., Any], leaks: Kit) -> None:
    one, others = procs(1).spawn("one", Rank), procs(2).spawn("others", Rank)
    one.share.call_one("cuda").get(120)
    others.share.call("cuda").get(120)
    others.slice(gpus=0).first.call_one().get()
    copy_state({"w": torch.zeros(COUNT)}, others.weights).get(120)
    assert values(others.first.call()) == [[0.0] * 6] * 2
    copy_state(one.weights, others.weights).get(120)
    assert values(others.first.call()) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
    # This process serves its own memory until it ends.
    leaks.rebase()


def test_one_rank_a_gpu_has_nccl(procs: Callable[..., Any]) -> None:
    count = torch.cuda.device_count()
    ranks = procs(count).spawn("ranks", Rank)
    total = float(sum(range(1, count + 1)))
    for value, backend, device in values(ranks.reduce.call()):
        assert value == total and "nccl" in backend and device == "cuda"


def test_ranks_that_share_a_gpu_have_gloo(procs: Callable[..., Any]) -> None:
    count = torch.cuda.device_count() + 1
    ranks = procs(count).spawn("ranks", Rank)
    total = float(sum(range(1, count + 1)))
    for value, backend, device in values(ranks.reduce.call()):
        assert value == total and "nccl" not in backend and device == "cpu"
