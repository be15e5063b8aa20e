"""Batches of reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._node.future import Future
from monarch._state.rdma.buffer import RDMABuffer, submit
from monarch._tensors.memory.views import Memory
from monarch._tensors.transports.base import Move
from monarch.exceptions import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self


class RDMAAction:
    """A batch of reads and writes: those with one owner cost about as much as a single one.

    ``RDMAAction().read_remote(dst, buffer).write_remote(other, src).submit().get()``. Each ``submit`` moves the values
    of that moment. All reads run before any write.
    """

    def __init__(self) -> None:
        self._reads: list[Move] = []
        self._writes: list[Move] = []

    def read_remote(self, dst: Any, src: RDMABuffer) -> Self:
        """Add a read of a buffer into local memory; see ``RDMABuffer.read_into``.

        Raises:
            ArgumentError: the buffer does not fit, or ``dst`` overlaps local memory of this action.
        """
        move = src.reading(dst)
        self._check(move.local, [*self._reads, *self._writes])
        self._reads.append(move)
        return self

    def write_remote(self, dst: RDMABuffer, src: Any) -> Self:
        """Add a write of local memory into a buffer; see ``RDMABuffer.write_from``.

        Raises:
            ArgumentError: ``src`` does not fit, or overlaps local memory that this action reads into.
        """
        move = dst.writing(src)
        self._check(move.local, self._reads)
        self._writes.append(move)
        return self

    def submit(self, timeout: float = 60.0) -> Future[None]:
        """Run all reads, then all writes.

        Args:
            timeout: seconds for an owner on another host to answer.

        Returns:
            A future that is done when all bytes have arrived. Its error is that of the first failed transfer; other
            transfers may have succeeded.

        Raises:
            ArgumentError: the timeout is not above 0.
        """
        return submit(self._reads, self._writes, timeout)

    def _check(self, memory: Memory, others: list[Move]) -> None:
        for _, other, _ in others:
            same = other.device == memory.device
            if same and memory.address < other.address + other.size and other.address < memory.address + memory.size:
                raise ArgumentError(
                    "this memory overlaps other memory of the same action, so the result would depend on their order; "
                    "submit two actions, one after the other"
                )

    def __len__(self) -> int:
        return len(self._reads) + len(self._writes)
