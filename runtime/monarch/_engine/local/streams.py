"""Streams: ops that need not wait for each other. On GPUs each is a CUDA stream; on CPUs a rank runs all in order."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from monarch._engine.issuing.lines import lines
from monarch._engine.local.checking import check_input
from monarch._engine.local.tensor import RankTensor
from monarch.exceptions import ArgumentError, MeshOpError

if TYPE_CHECKING:
    from typing_extensions import Self

_numbers = count(1)


class Borrow:
    """The loan of a tensor to another stream, which ends with ``drop``, or at the end of ``with borrow:``.

    Attributes:
        mutable: whether the borrowing stream may change the tensor.
        dropped: whether it has ended.
    """

    def __init__(self, tensor: RankTensor, result: RankTensor, mutable: bool) -> None:
        self.mutable = mutable
        self.dropped = False
        self._tensor = tensor
        self._result = result
        self._where = str(lines[lines.here()])

    def drop(self) -> None:
        """End the loan: the stream that owns the tensor waits for the borrowing one, and may change it again."""
        if self.dropped:
            return
        self.dropped = True
        tensor, result = self._tensor, self._result
        if self.mutable:
            tensor.monarch_loans -= 1
        if not tensor.monarch_dropped:
            _order(tensor, result.stream.number, tensor.stream.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()

    def __del__(self) -> None:
        # The tensor would stay locked.
        if not self.dropped:
            self.dropped = True
            if self.mutable:
                self._tensor.monarch_loans -= 1

    def __repr__(self) -> str:
        state = "dropped" if self.dropped else "mutable" if self.mutable else "read only"
        return f"<Borrow of {self._where.partition(chr(10))[0]}: {state}>"


class Stream:
    """A stream of the ops on rank-local tensors, on all ranks of a mesh.

    Args:
        name: shown in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)

    @contextmanager
    def activate(self) -> Generator[Stream]:
        """Let ops in a block make tensors of this stream."""
        before, streams.active = streams.active, None if self is main else self
        try:
            yield self
        finally:
            streams.active = before

    def borrow(self, tensor: RankTensor, mutable: bool = False) -> tuple[RankTensor, Borrow]:
        """Lend a tensor of another stream to this one, which waits for its value.

        Args:
            tensor: a rank-local tensor.
            mutable: whether this stream may change it. Then other streams may not use it before the end.

        Returns:
            The tensor for this stream, and the loan, which must be ended by ``drop``.

        Raises:
            ArgumentError: it is not a rank-local tensor.
            MeshOpError: it was dropped, or is borrowed already.
        """
        given: Any = tensor
        if not isinstance(given, RankTensor):
            raise ArgumentError(f"borrow: expected a rank-local tensor, got {type(given).__name__}")
        check_input("borrow", tensor)
        if mutable and tensor.requires_grad:
            raise MeshOpError("borrow: a tensor that requires grad cannot be borrowed with mutable=True; use detach()")
        if mutable and tensor.monarch_loan is not None and not tensor.monarch_loan.mutable:
            raise MeshOpError("borrow: a tensor that is borrowed read-only cannot be borrowed with mutable=True")
        result = RankTensor(tensor.monarch_ref, tensor.monarch_layout, None if self is main else self)
        loan = Borrow(tensor, result, mutable)
        result.monarch_loan = loan
        if mutable:
            tensor.monarch_loans += 1
        _order(tensor, tensor.stream.number, self.number)
        return result, loan

    def __repr__(self) -> str:
        return f"<Stream {self.name!r}>"


def _order(tensor: RankTensor, first: int, second: int) -> None:
    """Let a stream wait for another one on the ranks."""
    if first != second:
        tensor.monarch_layout.mesh.issue("order", (first, second))


class _Main(Stream):
    """The stream of all tensors without another one."""

    def __init__(self) -> None:
        self.name = "main"
        self.number = 0


main = _Main()


class _Streams(threading.local):
    """The active stream of the calling thread; None for the main one."""

    def __init__(self) -> None:
        self.active: Stream | None = None


streams = _Streams()


def get_active_stream() -> Stream:
    """Return the stream that is active in the calling thread."""
    return streams.active or main
