"""TCP connections from another host to this one, over the standard input and output of a command that runs there.

The same file is both sides. The far side is sent to any Python from 3.8, so it uses the standard library only. The near
side is a process of its own, which ends with a line on its standard input, or its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

_HEADER = struct.Struct(">BII")
"""Kind, connection, and length of what follows."""
_PORTS, _OPEN, _DATA, _END = range(4)
_CHUNK = 1 << 16


class StreamRelay:
    """Connections that share one stream.

    Args:
        reader: what the other side sends.
        writer: to the other side.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()
        self._peers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, kind: int, number: int, data: bytes) -> None:
        """Send a frame; wait while the stream is full."""
        async with self._sending:
            self._writer.write(_HEADER.pack(kind, number, len(data)) + data)
            await self._writer.drain()

    async def receive(self) -> tuple[int, int, bytes]:
        """Return the next frame."""
        kind, number, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
        return kind, number, await self._reader.readexactly(size)

    async def carry(self, number: int, reader: asyncio.StreamReader) -> None:
        """Send the bytes of a connection until its end."""
        try:
            data = await reader.read(_CHUNK)
            while data:
                await self.send(_DATA, number, data)
                data = await reader.read(_CHUNK)
        except ConnectionError:
            pass
        await self.send(_END, number, b"")

    def begin(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take over a connection."""
        self._peers[number] = writer
        task = asyncio.ensure_future(self.carry(number, reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, opened: Callable[[int, int], Awaitable[None]]) -> None:
        """Pass on frames until the stream ends.

        Args:
            opened: called with each new connection and the index of its port.
        """
        while True:
            try:
                kind, number, data = await self.receive()
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if kind == _OPEN:
                await opened(number, data[0])
                continue
            peer = self._peers.get(number) if kind == _DATA else self._peers.pop(number, None)
            if peer is None:
                continue
            try:
                if kind == _DATA:
                    peer.write(data)
                    await peer.drain()
                else:
                    peer.close()
            except ConnectionError:
                self._peers.pop(number, None)


async def far_side(count: int) -> None:
    """Listen on ports of 127.0.0.1, and pass on the connections to them."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(os.dup(1), "wb"))
    relay = StreamRelay(reader, asyncio.StreamWriter(transport, protocol, None, loop))
    numbers = iter(range(1 << 32))
    servers: list[Any] = []

    def accept(index: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def accepted(here: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
            number = next(numbers)
            await relay.send(_OPEN, number, bytes([index]))
            relay.begin(number, here, there)

        return accepted

    for index in range(count):
        servers.append(await asyncio.start_server(accept(index), "127.0.0.1", 0))
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    await relay.send(_PORTS, 0, json.dumps(ports).encode())

    async def refuse(number: int, index: int) -> None:
        del number, index

    await relay.run(refuse)


async def near_side(targets: Sequence[str], command: Sequence[str], source: bytes) -> None:
    """Run the far side by a command, print its ports, and connect what comes to the targets.

    Args:
        targets: ``address:port``, in the order of the ports.
        command: runs ``payload.BOOT`` there.
        source: this file.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"%d\n%s" % (len(source), source))
    relay = StreamRelay(process.stdout, process.stdin)

    async def connect(number: int, index: int) -> None:
        machine, _, port = targets[index].rpartition(":")
        try:
            relay.begin(number, *await asyncio.open_connection(machine, int(port)))
        except OSError:
            await relay.send(_END, number, b"")

    async def until_closed() -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        # A line ends it too: a fork of the program may still hold the pipe.
        await reader.readline()

    closed = asyncio.ensure_future(until_closed())
    try:
        first = asyncio.ensure_future(relay.receive())
        await asyncio.wait([first, closed], return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            return
        kind, _, data = first.result()
        if kind != _PORTS:
            return
        print(data.decode(), flush=True)
        await asyncio.wait([asyncio.ensure_future(relay.run(connect)), closed], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.IncompleteReadError:
        pass
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


if __name__ == "__main__":
    # The far side is told the number of its ports.
    if sys.argv[-1].isdigit():
        asyncio.run(far_side(int(sys.argv[-1])))
    else:
        _order = json.loads(sys.argv[1])
        with open(__file__, "rb") as _file:
            _source = _file.read()
        asyncio.run(near_side(_order["targets"], _order["command"], _source))
