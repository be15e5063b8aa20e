"""TCP ports of ranks, reached through other ranks or this machine: the bytes go by messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import concurrent_endpoint, endpoint
from monarch._actors.ports import Channel, Port, PortReceiver
from monarch._core.shapes.extent import Point
from monarch._meshes.context import context
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch.exceptions import ArgumentError

_CHUNK = 1 << 16


class PortForwarder(Actor):
    """Forwards TCP connections from processes of one mesh to a service on those of another, place by place.

    ``this_proc().spawn("forward", PortForwarder).forward.call_one(ranks, 6006, here, "127.0.0.1:6006").get()``.
    """

    @endpoint
    async def forward(
        self,
        dst_proc_mesh: ProcMesh,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: ProcMesh,
        src_address: str | Callable[[Point], str],
    ) -> None:
        """Listen on each source process, and connect to the destination process at the same place.

        Args:
            dst_proc_mesh: processes whose machine has the service.
            dst_port: its port there on 127.0.0.1, or a function of the place.
            src_proc_mesh: processes that listen; same axes and sizes as ``dst_proc_mesh``.
            src_address: the address they listen on as ``host:port``, or a function of the place.

        Raises:
            ArgumentError: the meshes differ in shape, or a port or an address is invalid.
        """
        if dst_proc_mesh.extent != src_proc_mesh.extent:
            raise ArgumentError(
                f"the meshes must have the same shape, got {dst_proc_mesh.extent} and {src_proc_mesh.extent}"
            )
        connects: Any = dst_proc_mesh.spawn("forward_to", Destination, dst_port)
        listens: Any = src_proc_mesh.spawn("forward_from", ForwardingSource)
        await listens.listen.call(src_address, connects)


class Destination(Actor):
    """Connects to the service on its machine."""

    def __init__(self, port: int | Callable[[Point], int]) -> None:
        number = port(context().actor_instance.rank) if callable(port) else port
        if type(number) is not int or not 0 < number < 65536:
            raise ArgumentError(f"dst_port: expected a port from 1 to 65535, got {number!r}")
        self._port = number
        self._tasks: set[asyncio.Task[None]] = set()

    @concurrent_endpoint
    async def connect(self, back: Port[bytes]) -> Port[bytes]:
        """Open a connection; its bytes go to ``back``, and what comes through the returned port goes to it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        port, receiver = Channel[bytes].open()
        _relay(self._tasks, reader, writer, back, receiver)
        return port

    async def __cleanup__(self, exc: Exception | None) -> None:
        await _end(self._tasks)


class ForwardingSource(Actor):
    """Listens, and sends what arrives to the destination at its place."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @endpoint
    async def listen(self, address: str | Callable[[Point], str], connects: Any) -> None:
        """Accept connections on an address."""
        place = context().actor_instance.rank
        text = address(place) if callable(address) else address
        host, _, port = str(text).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ArgumentError(f"src_address: expected host:port, got {text!r}")
        peer = connects.slice(**place)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, receiver = Channel[bytes].open()
            try:
                _relay(self._tasks, reader, writer, await peer.connect.call_one(back), receiver)
            except Exception:
                writer.close()

        self._servers.append(await asyncio.start_server(accept, host.strip("[]"), int(port)))

    async def __cleanup__(self, exc: Exception | None) -> None:
        for server in self._servers:
            server.close()
        await _end(self._tasks)


def _relay(
    tasks: set[asyncio.Task[None]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    port: Port[bytes],
    receiver: PortReceiver[bytes],
) -> None:
    """Start the two directions of a connection; empty bytes are the end of one."""
    task = asyncio.get_running_loop().create_task(_both(reader, writer, port, receiver))
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _both(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: Port[bytes], receiver: PortReceiver[bytes]
) -> None:
    try:
        await asyncio.gather(_send(reader, port), _receive(receiver, writer))
    finally:
        # Not before both have ended: a writer that nobody holds closes the connection.
        writer.close()


async def _send(reader: asyncio.StreamReader, port: Port[bytes]) -> None:
    try:
        while data := await reader.read(_CHUNK):
            port.send(data)
    except OSError:
        # The connection was reset; the other side sees its end.
        pass
    finally:
        port.send(b"")


async def _receive(receiver: PortReceiver[bytes], writer: asyncio.StreamWriter) -> None:
    try:
        while data := await receiver.recv():
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        # The connection was reset; the other direction ends too.
        writer.close()


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
