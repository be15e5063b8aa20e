"""What all ways of moving bytes between processes have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy

from monarch._tensors.memory.registry import Remote
from monarch._tensors.memory.views import Memory
from monarch.exceptions import ArgumentError, TransferError


class Move(NamedTuple):
    """Bytes to be moved between a piece of another process's memory and one of this process."""

    remote: Remote
    local: Memory
    spans: numpy.ndarray | None = None
    """Of each run of bytes a row: the offset in the remote piece, that in the local one, and how many; int64.

    None for as many bytes as the local piece has, from the beginning of both.
    """

    @property
    def rows(self) -> numpy.ndarray:
        """The spans, also if there is one only."""
        return self.spans if self.spans is not None else numpy.array([[0, 0, self.local.size]], dtype=numpy.int64)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.local.size if self.spans is None else int(self.spans[:, 2].sum())


def check_spans(move: Move) -> None:
    """Whether all runs are within both pieces; ArgumentError if not. Before any byte moves."""
    if move.spans is None and move.local.size <= move.remote.size:
        return
    spans = move.rows
    for column, size, what in ((0, move.remote.size, "the buffer"), (1, move.local.size, "the memory here")):
        if len(spans) and (int(spans.min()) < 0 or int((spans[:, column] + spans[:, 2]).max()) > size):
            raise ArgumentError(f"the bytes to be moved are not all within the {size} of {what}")


class Transport(Protocol):
    """A way of moving bytes between two processes; both directions are one-sided."""

    name: str

    def reason_against(self, remote: Remote, local_device: str) -> str:
        """Why it cannot be used between this process and a piece of memory; empty if it can."""
        ...

    def forget(self, proc: str) -> None:
        """Lets go of what it has of a process, which has died."""

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        """Moves bytes of pieces that all belong to one process, and returns when all are there.

        Raises:
            TransferError: the owner has died or dropped a piece; the text says whether bytes may have been written.
        """
        ...


def dropped(remote: Remote) -> TransferError:
    """The error of a buffer that is not there any more, before any byte was moved."""
    return TransferError(
        f"the buffer of {remote.title} was dropped, or its actor was stopped; ask its owner for a new one. Nothing was "
        f"written",
        mesh=remote.proc,
    )


def lost_meanwhile(remote: Remote, writing: bool, why: str) -> TransferError:
    """The error of a buffer that went while bytes were moved."""
    what = "the buffer" if writing else "the destination"
    return TransferError(
        f"{why} while its memory was {'written' if writing else 'read'}: {what} may be partly written, so its content "
        f"is not to be used",
        mesh=remote.proc,
    )
