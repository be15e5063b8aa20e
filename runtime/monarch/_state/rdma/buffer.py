"""Buffers: memory of one actor that others read and write without its participation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._node.current import current_node, open_node
from monarch._node.future import DoneFuture, Future, in_thread, then
from monarch._node.services.asking import ask_proc
from monarch._procs.os.helpers import be_helper
from monarch._state.rdma.plane import drop, plane
from monarch._tensors.memory.registry import MemoryReference
from monarch._tensors.memory.staging import pending_work
from monarch._tensors.memory.views import check_fit, memory_of
from monarch._tensors.transports.base import Move
from monarch._tensors.transports.cuda_ipc import has_waiting_work
from monarch.exceptions import ArgumentError

_AT_ONCE = 1 << 20
"""Maximum bytes of a copy within a host that runs in the calling thread: it takes less time than starting a thread."""
_QUICK = {"local", "attach"}
_AT_ONCE_ON_GPUS = 256 << 20
"""The same between GPUs: at most 10 ms by the slowest bus, and a new thread takes 1 ms to reach a GPU."""


class ByteCount(int):
    """A number of bytes. Calling it, as programs for torchmonarch do, returns the same number."""

    def __call__(self) -> int:
        return int(self)


class RDMABuffer:
    """Memory that actors of any process read and write, while its owner does other work.

    The owner creates the buffer and sends it as an argument or a result; the receivers get a handle. The memory stays
    allocated until ``drop``, or until the actor that created the buffer has ended. The owner is not notified of reads
    and writes: send it a message. Transfers do not wait for the owner's GPU: call ``torch.cuda.synchronize()`` there
    before you send a message that others may read.

    Args:
        data: a tensor on the CPU or a GPU, or a memoryview: one-dimensional, contiguous and not empty. It may be a part
            of a larger one. ``tensor.view(-1)`` makes any contiguous tensor one-dimensional, and receivers can read a
            ``view(torch.uint8)`` into any dtype. A buffer of read-only memory cannot be written.

    Raises:
        ArgumentError: the memory is of another kind. It is also a ValueError and a TypeError.
    """

    def __init__(self, data: Any) -> None:
        # A program may create a buffer before it uses anything else of this package.
        open_node()
        self._remote = plane().share(memory_of(data, "the memory of a buffer"))

    @classmethod
    def _of(cls, remote: MemoryReference) -> RDMABuffer:
        buffer = cls.__new__(cls)
        buffer._remote = remote
        return buffer

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (tuple(self._remote),)

    @property
    def size(self) -> ByteCount:
        """Size in bytes; ``buffer.size()`` works too."""
        return ByteCount(self._remote.size)

    @property
    def owner(self) -> str:
        """Proc id of the process that owns the memory."""
        return self._remote.proc

    @property
    def dtype(self) -> str:
        """Dtype of the owner's tensor, such as ``float32``; empty for bytes."""
        return self._remote.dtype

    @property
    def device(self) -> str:
        """Device of the memory: ``cpu``, or ``cuda:N`` with the owner's number."""
        return self._remote.device

    @property
    def backend(self) -> str:
        """Transport between this process and the buffer, for local memory on the same kind of device."""
        return plane().transport_to(self._remote, self._local_device()).name

    def transports(self) -> dict[str, str]:
        """Return the transports, best first, each with the reason against it; empty for the transport in use."""
        return dict(plane().reasons(self._remote, self._local_device()))

    def _local_device(self) -> str:
        return "cpu" if self._remote.device == "cpu" else "cuda:0"

    def part(self, offset: int, size: int) -> RDMABuffer:
        """Return a handle of a part of the buffer.

        Args:
            offset: the offset of the first byte.
            size: in bytes.

        Raises:
            ArgumentError: the part is not within the buffer.
        """
        remote = self._remote
        if offset < 0 or size < 1 or offset + size > remote.size:
            raise ArgumentError(f"bytes {offset} to {offset + size} are outside the buffer of {remote.size} bytes")
        return RDMABuffer._of(remote._replace(offset=remote.offset + offset, size=size))

    def read_into(self, dst: Any, *, timeout: float = 60.0) -> Future[None]:
        """Copy the buffer into local memory.

        Args:
            dst: a tensor or memoryview at least as large as the buffer, on the CPU or a GPU; of the same dtype, or
                bytes.
            timeout: seconds for an owner on another host to answer.

        Returns:
            A future that is done when all bytes have arrived. It fails with TransferError if the owner has died or
            dropped the buffer; the message tells whether a part of ``dst`` may have been written.

        Raises:
            ArgumentError: ``dst`` does not fit; nothing was written.
        """
        return submit([self.reading(dst)], [], timeout)

    def write_from(self, src: Any, *, timeout: float = 60.0) -> Future[None]:
        """Copy local memory into the buffer, at its start.

        Args:
            src: a tensor or memoryview, at most as large as the buffer; of the same dtype, or bytes.
            timeout: seconds for an owner on another host to answer.

        Returns:
            A future that is done when all bytes have arrived; errors as for ``read_into``.

        Raises:
            ArgumentError: ``src`` does not fit, or the buffer is read-only; nothing was written.
        """
        return submit([], [self.writing(src)], timeout)

    def reading(self, dst: Any) -> Move:
        """Return the moves for a read.

        Raises:
            ArgumentError: the destination does not fit.
        """
        local = memory_of(dst, "the destination")
        check_fit(local, self._remote.size, self._remote.dtype, False)
        return Move(self._remote, local.part(0, self._remote.size))

    def writing(self, src: Any) -> Move:
        """Return the moves for a write.

        Raises:
            ArgumentError: the source does not fit, or the buffer is read-only.
        """
        local = memory_of(src, "the source")
        check_fit(local, self._remote.size, self._remote.dtype, True)
        if self._remote.readonly:
            raise ArgumentError("the buffer is read-only, because its owner made it from a read-only memoryview")
        return Move(self._remote, local)

    def drop(self) -> Future[None]:
        """Release the memory in its owner. Any holder of a handle may do this. Later reads and writes fail."""
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
        raise ArgumentError(f"timeout: expected seconds above 0, got {timeout!r}")
    here = plane()

    def work() -> None:
        if reads:
            here.move(reads, False, timeout)
        if writes:
            here.move(writes, True, timeout)

    if _is_quick([*reads, *writes]):
        try:
            work()
        except Exception as error:
            return _done(error)
        return _done(None)
    pending = pending_work([each.local for each in (*reads, *writes)])

    def as_helper() -> None:
        be_helper()
        for event in pending:
            event.synchronize()
        work()

    return in_thread(current_node(), "transfer", as_helper)


def _is_quick(moves: Sequence[Move]) -> bool:
    """Return whether a copy takes less time than a thread for it, and waits for nothing."""
    here, size = plane(), sum(move.size for move in moves)
    try:
        ways = {(local.device == "cpu", here.known_transport(remote, local.device)) for remote, local, _ in moves}
        if ways == {(False, "cuda_ipc")}:
            return size <= _AT_ONCE_ON_GPUS and not any(map(has_waiting_work, {each.local.device for each in moves}))
    except Exception:
        # The future raises this error.
        return False
    return size <= _AT_ONCE and all(is_cpu and name in _QUICK for is_cpu, name in ways)


def _done(error: Exception | None) -> Future[None]:
    return DoneFuture(current_node(), "transfer", None, error)


def _received(remote: tuple[Any, ...]) -> RDMABuffer:
    return RDMABuffer._of(MemoryReference(*remote))  # pyright: ignore[reportPrivateUsage]
