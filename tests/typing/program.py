"""A user's program, which pyright and mypy check in their strict modes: ``test_typing.py``. It is not run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import assert_type

from monarch.actor import (
    Accumulator,
    Actor,
    Channel,
    Context,
    Endpoint,
    Extent,
    Future,
    HostMesh,
    MeshFailure,
    Point,
    Port,
    PortReceiver,
    ProcMesh,
    ValueMesh,
    as_endpoint,
    attach_to_workers,
    checkpoint,
    concurrent_endpoint,
    context,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    heal_mesh,
    proc_mesh,
    restore,
    send,
    shutdown_context,
    supervise,
    this_host,
    this_proc,
)
from monarch.exceptions import ActorError, DeviceMeshError


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start + current_rank().rank

    @endpoint
    def add(self, n: int, times: int = 1) -> int:
        self.logger.info("adding %d", n)
        self.value += n * times
        return self.value

    @endpoint
    async def name(self) -> str:
        await asyncio.sleep(0)
        return str(self.value)

    @concurrent_endpoint
    async def weights(self, scale: float) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(2) * scale}

    @endpoint(concurrent=True)
    async def waiting(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return True

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], text: str) -> None:
        port.send(text)

    @endpoint
    def reset(self) -> None:
        self.value = 0

    def plain(self, n: int) -> int:
        return n


class Registry(Actor):
    @endpoint
    def lookup(self, key: str) -> list[int]:
        return [len(key)]


def meshes() -> None:
    host = this_host()
    assert_type(host, HostMesh)
    procs = host.spawn_procs(per_host={"gpus": 4})
    assert_type(procs, ProcMesh)
    assert_type(procs.slice(gpus=slice(0, 2)), ProcMesh)
    assert_type(procs.extent, Extent)
    assert_type(procs.size("gpus"), int)
    assert_type(procs.initialized, Future[bool])
    assert_type(this_proc(), ProcMesh)
    assert_type(attach_to_workers(ca="cluster.key", workers=["tcp://node1:22222"]), HostMesh)
    with procs:
        pass
    assert_type(procs.stop(), Future[None])
    shutdown_context().get()


def calls(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", Counter, 100)
    assert_type(counters, Counter)
    assert_type(counters.add.call(1), Future[ValueMesh[int]])
    table = counters.add.call(1, times=2).get(timeout=5.0)
    assert_type(table, ValueMesh[int])
    assert_type(counters.add.call_one(1), Future[int])
    assert_type(counters.add.call_one(1).get(), int)
    assert_type(counters.name.choose().get(), str)
    assert_type(counters.add.broadcast(1), None)
    assert_type(counters.add.stream(1), Iterator[Future[int]])
    for future in counters.name.stream():
        assert_type(future.get(), str)
    assert_type(counters.weights.call_one(0.5).get(), dict[str, torch.Tensor])
    assert_type(counters.waiting.call_one(0.5).get(), bool)
    assert_type(counters.reset.call().get(), ValueMesh[None])
    assert_type(counters.later.call_one("x").get(), str)
    assert_type(as_endpoint(counters.plain).call(2).get(), ValueMesh[int])
    assert_type(counters.add.call_one(1).exception(), BaseException | None)


def views(counters: Counter) -> None:
    assert_type(counters.slice(gpus=3), Counter)
    assert_type(counters.slice(gpus=3).add.call_one(1).get(), int)
    assert_type(counters.flatten("ranks"), Counter)
    assert_type(counters.extent, Extent)
    assert_type(counters.size(), int)
    assert_type(len(counters), int)
    assert_type(counters.initialized, Future[None])
    assert_type(counters.stop(), Future[None])


async def awaits(counters: Counter) -> None:
    assert_type(await counters.add.call(1), ValueMesh[int])
    assert_type(await counters.name.call_one(), str)
    first, second = await asyncio.gather(counters.add.call_one(1), counters.name.call_one())
    assert_type(first, int)
    assert_type(second, str)
    procs = await proc_mesh(gpus=2)
    assert_type(procs, ProcMesh)


def values(table: ValueMesh[int]) -> None:
    assert_type(table.get(0), int)
    assert_type(table.item(gpus=1), int)
    assert_type(table[0], int)
    assert_type(table[0:2], ValueMesh[int])
    assert_type(list(table.values()), list[int])
    for point, value in table:
        assert_type(point, Point)
        assert_type(point["gpus"], int)
        assert_type(value, int)
    for point, value in table.items():
        assert_type(point, Point)
        assert_type(value, int)
    assert_type(table.map(str), ValueMesh[str])
    assert_type(table.slice(gpus=0), ValueMesh[int])


def places() -> None:
    assert_type(context(), Context)
    assert_type(context().message_rank, Point)
    assert_type(context().actor_instance.rank, Point)
    assert_type(context().actor_instance.proc_mesh, ProcMesh)
    assert_type(current_rank().rank, int)
    assert_type(current_size(), dict[str, int])


def ports(counters: Counter) -> None:
    port, receiver = Channel[int].open()
    assert_type(port, Port[int])
    assert_type(receiver, PortReceiver[int])
    assert_type(receiver.recv(), Future[int])
    send(counters.add, (1,), {}, port)
    total = Accumulator(counters.add, 0, lambda a, b: a + b)
    assert_type(total.accumulate(1), Future[int])
    futures: list[Future[Any]] = [receiver.recv(), counters.name.call_one()]
    print(futures)


def takes_endpoint(f: Endpoint[[int], int]) -> int:
    return f.call_one(1).get()


def failures(procs: ProcMesh, counters: Counter) -> None:
    def handle(failure: MeshFailure) -> bool:
        print(failure.report())
        heal_mesh(failure.mesh)
        return True

    with supervise(procs, handle):
        counters.add.call(1).get()
    try:
        counters.add.call(1).get()
    except DeviceMeshError as error:
        print(error)
    except ActorError as error:
        print(error)
    heal_mesh(counters)
    assert_type(checkpoint(counters, "folder"), Future[str])
    assert_type(restore(counters, "folder").get(), str)
    assert_type(get_or_spawn_controller("registry", Registry), Future[Registry])
    assert_type(get_or_spawn_controller("registry", Registry).get().lookup.call_one("x").get(), list[int])
