"""Buffers: memory of one actor that others read and write without its help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._node.current import current_node, open_node
from monarch._node.future import Future, Ready, in_thread, then
from monarch._node.services.asking import ask_proc
from monarch._procs.os.helpers import be_helper
from monarch._state.rdma.plane import drop, plane
from monarch._tensors.memory.registry import Remote
from monarch._tensors.memory.views import check_fit, memory_of
from monarch._tensors.transports.base import Move
from monarch.exceptions import ArgumentError

_AT_ONCE = 1 << 20
"""Bytes up to which a copy within a host is made in the thread that asks for it: another would only begin by then."""
_QUICK = {"local", "attach"}


class ByteCount(int):
    """A number of bytes; programs that call it as a method, as torchmonarch's do, get the same."""

    def __call__(self) -> int:
        return int(self)


class RDMABuffer:
    """Memory that other actors read and write, wherever they are, while its owner does something else.

    It is made by the owner, and sent to others as an argument or a result; what arrives is a handle of it.
    The memory is kept until ``drop``, or until the actor that made the buffer has ended. Nothing tells the owner of a
    read or a write: send it a message. And nothing waits for the owner's GPU: what it has begun there after it made the
    buffer is to be finished, by ``torch.cuda.synchronize()``, before it tells others that they can read.

    Args:
        data: a tensor on the CPU or a GPU, or a memoryview: one-dimensional, contiguous and not empty, parts of larger
            ones too. ``tensor.view(-1)`` makes one of any contiguous tensor, and of ``view(torch.uint8)`` any dtype is
            read. Read-only memory can be read only.

    Raises:
        ArgumentError: the memory is none of these; a ValueError and a TypeError too.
    """

    def __init__(self, data: Any) -> None:
        # A program may make a buffer before anything else.
        open_node()
        self._remote = plane().share(memory_of(data, "the memory of a buffer"))

    @classmethod
    def _of(cls, remote: Remote) -> RDMABuffer:
        buffer = cls.__new__(cls)
        buffer._remote = remote
        return buffer

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (tuple(self._remote),)

    @property
    def size(self) -> ByteCount:
        """Bytes: a number, that may be called as well, as in ``buffer.size()``."""
        return ByteCount(self._remote.size)

    @property
    def owner(self) -> str:
        """Proc id of the process that has the memory."""
        return self._remote.proc

    @property
    def dtype(self) -> str:
        """Of the owner's tensor, such as ``float32``; empty for bytes."""
        return self._remote.dtype

    @property
    def device(self) -> str:
        """Where the memory is: ``cpu``, or ``cuda:N`` as the owner counts."""
        return self._remote.device

    @property
    def backend(self) -> str:
        """The transport that is used from here for memory of the CPU, or of a GPU if the buffer's is."""
        return plane().way_to(self._remote, self._local_device()).name

    def transports(self) -> dict[str, str]:
        """Return the transports considered, best first, each with why it is not used; empty for the one in use."""
        return dict(plane().reasons(self._remote, self._local_device()))

    def _local_device(self) -> str:
        return "cpu" if self._remote.device == "cpu" else "cuda:0"

    def part(self, offset: int, size: int) -> RDMABuffer:
        """Return a handle of some bytes of it.

        Args:
            offset: of the first one.
            size: how many.

        Raises:
            ArgumentError: they are not within the buffer.
        """
        remote = self._remote
        if offset < 0 or size < 1 or offset + size > remote.size:
            raise ArgumentError(f"bytes {offset} to {offset + size} are not within a buffer of {remote.size} bytes")
        return RDMABuffer._of(remote._replace(offset=remote.offset + offset, size=size))

    def read_into(self, dst: Any, *, timeout: float = 60.0) -> Future[None]:
        """Copy the buffer into memory here.

        Args:
            dst: a tensor or memoryview at least as large, on the CPU or a GPU; of the same dtype, or bytes.
            timeout: seconds for an owner on another host to answer.

        Returns:
            Done when all bytes are there. Its error is a TransferError if the owner has died or has dropped the buffer;
            the text says whether a part of ``dst`` may have been written.

        Raises:
            ArgumentError: ``dst`` does not fit; nothing was written.
        """
        return submit([self.reading(dst)], [], timeout)

    def write_from(self, src: Any, *, timeout: float = 60.0) -> Future[None]:
        """Copy memory from here into the buffer, from its beginning.

        Args:
            src: a tensor or memoryview, at most as large; of the same dtype, or bytes.
            timeout: seconds for an owner on another host to answer.

        Returns:
            Done when all bytes are there; errors as for ``read_into``.

        Raises:
            ArgumentError: ``src`` does not fit, or the buffer can only be read; nothing was written.
        """
        return submit([], [self.writing(src)], timeout)

    def reading(self, dst: Any) -> Move:
        """Return the moves for a read; raise ArgumentError if it does not fit."""
        local = memory_of(dst, "the destination")
        check_fit(local, self._remote.size, self._remote.dtype, False)
        return Move(self._remote, local.part(0, self._remote.size))

    def writing(self, src: Any) -> Move:
        """Return the moves for a write; raise ArgumentError if it does not fit."""
        local = memory_of(src, "the source")
        check_fit(local, self._remote.size, self._remote.dtype, True)
        if self._remote.readonly:
            raise ArgumentError("the buffer can only be read: it is of a read-only memoryview")
        return Move(self._remote, local)

    def drop(self) -> Future[None]:
        """Release the memory in its owner; any holder of a handle may do so. Later reads and writes fail."""
        node = current_node()
        remote = self._remote
        if remote.proc == node.proc:
            plane().drop(remote.key)
            return _done(None)
        answer = ask_proc(remote.proc, drop, remote.key)

        def finish() -> None:
            answer.get()

        return then(answer, "drop", finish)

    def __repr__(self) -> str:
        what = f" of {self._remote.dtype}" if self._remote.dtype else ""
        return f"<RDMABuffer of {self._remote.size} bytes{what} on {self._remote.device} of {self._remote.title}>"


def submit(reads: Sequence[Move], writes: Sequence[Move], timeout: float) -> Future[None]:
    """Move bytes, reads before writes; return a future that is done when all have arrived."""
    if not timeout > 0:
        raise ArgumentError(f"timeout is a number of seconds above 0, and not {timeout!r}")
    here = plane()

    def work() -> None:
        if reads:
            here.move(reads, False, timeout)
        if writes:
            here.move(writes, True, timeout)

    if sum(move.size for move in (*reads, *writes)) <= _AT_ONCE and _quick(reads) and _quick(writes):
        try:
            work()
        except Exception as error:
            return _done(error)
        return _done(None)

    def as_helper() -> None:
        be_helper()
        work()

    return in_thread(current_node(), "transfer", as_helper)


def _quick(moves: Sequence[Move]) -> bool:
    here = plane()
    try:
        return all(
            local.device == "cpu" and here.known_way(remote, local.device) in _QUICK for remote, local, _ in moves
        )
    except Exception:
        # Then it is the future's to say.
        return False


def _done(error: Exception | None) -> Future[None]:
    return Ready(current_node(), "transfer", None, error)


def _received(remote: tuple[Any, ...]) -> RDMABuffer:
    return RDMABuffer._of(Remote(*remote))
