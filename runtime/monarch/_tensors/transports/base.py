"""The common part of all transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy

from monarch._tensors.memory.registry import MemoryReference
from monarch._tensors.memory.views import Memory
from monarch.exceptions import ArgumentError, TransferError


class Move(NamedTuple):
    """A transfer between a piece of remote memory and one of this process."""

    remote: MemoryReference
    local: Memory
    spans: numpy.ndarray | None = None
    """Rows of remote offset, local offset and size in bytes; int64.

    None for the size of the local piece, from the beginning of both.
    """

    @property
    def rows(self) -> numpy.ndarray:
        """Return the spans, also for a single one."""
        return self.spans if self.spans is not None else numpy.array([[0, 0, self.local.size]], dtype=numpy.int64)

    @property
    def size(self) -> int:
        """Total bytes."""
        return self.local.size if self.spans is None else int(self.spans[:, 2].sum())


def check_spans(move: Move) -> None:
    """Check that all runs are inside both pieces; raises ArgumentError before any byte moves."""
    if move.spans is None and move.local.size <= move.remote.size:
        return
    spans = move.rows
    for column, size, what in ((0, move.remote.size, "the buffer"), (1, move.local.size, "the local memory")):
        if len(spans) and (int(spans.min()) < 0 or int((spans[:, column] + spans[:, 2]).max()) > size):
            raise ArgumentError(f"the transfer exceeds the {size} bytes of {what}")


class Transport(Protocol):
    """A way of moving bytes between two processes; both directions are one-sided."""

    name: str

    def reason_against(self, remote: MemoryReference, local_device: str) -> str:
        """Return why it cannot reach a piece of memory from this process; empty if it can."""
        ...

    def forget(self, proc: str) -> None:
        """Release everything held for a dead process."""

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        """Move bytes of pieces of one process, and return when all have arrived.

        Raises:
            TransferError: the owner died or dropped a piece; the text says whether bytes may have been written.
        """
        ...


def dropped(remote: MemoryReference) -> TransferError:
    """Return the error for a buffer that was gone before any byte was moved."""
    return TransferError(
        f"the buffer of {remote.title} was dropped, or its actor was stopped; ask its owner for a new one. Nothing was "
        f"written",
        mesh=remote.proc,
    )


def lost_meanwhile(remote: MemoryReference, writing: bool, why: str) -> TransferError:
    """Return the error for a buffer that vanished during a transfer."""
    what = "the buffer" if writing else "the destination"
    return TransferError(
        f"{why} while its memory was {'written' if writing else 'read'}: {what} may be partly written, so do not use "
        f"its content",
        mesh=remote.proc,
    )
