"""The file that a pickler writes to, which keeps large buffers out of the body."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

THRESHOLD = 120 * 1024
"""Size from which a buffer is sent beside the body: below, one more copy costs less than a frame of its own. Copies of
128 KiB and more cost far more: the allocator maps each again. At least pickle's frame size: see ``PickleSink``."""


class PickleSink:
    """The file that a pickler writes to. It turns large bytes and bytearrays in the stream into out-of-band buffers.

    CPython's pickler writes these in two calls: the first ends in opcode and length, the second is the object itself,
    not a copy. Opcode and length are replaced by a call of the type with the next buffer. Written otherwise, they would
    stay in the body, which works too, with more copies.
    """

    __slots__ = ("buffers", "chunks", "threshold")

    def __init__(self, threshold: int = THRESHOLD) -> None:
        self.threshold = threshold
        self.chunks: list[bytes | bytearray | memoryview] = []
        self.buffers: list[memoryview] = []

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether this buffer stays in the body, for the pickler."""
        raw = buffer.raw()
        if raw.nbytes < self.threshold:
            return True
        self.buffers.append(raw)
        return False

    def write(self, data: bytes | bytearray | pickle.PickleBuffer) -> None:
        if type(data) is pickle.PickleBuffer:
            # A buffer that stays in the body, written separately as it is larger than a frame.
            self.chunks.append(data.raw())
            return
        size = len(data)
        # A chunk of opcodes can be as large, but it is the first, or begins with a frame that fits into it.
        opcodes = not self.chunks or (data[:1] == pickle.FRAME and int.from_bytes(data[1:9], "little") <= size)
        if size >= self.threshold and not opcodes:
            before = bytes(self.chunks[-1])
            for header, call in _headers(data, size):
                if before.endswith(header):
                    self.chunks[-1] = before[: -len(header)] + call
                    self.buffers.append(memoryview(data))
                    return
        self.chunks.append(data)


def _headers(data: bytes | bytearray, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Return how the stream may announce this payload, and its replacement."""
    name = type(data).__name__.encode()
    # The two names, STACK_GLOBAL, NEXT_BUFFER, TUPLE1, REDUCE: nothing is memoized, so memo numbers stay valid.
    call = b"\x8c\x08builtins\x8c" + bytes([len(name)]) + name + b"\x93\x97\x85R"
    if type(data) is bytes:
        if size < 1 << 32:
            yield pickle.BINBYTES + size.to_bytes(4, "little"), call
        yield pickle.BINBYTES8 + size.to_bytes(8, "little"), call
    elif type(data) is bytearray:
        yield pickle.BYTEARRAY8 + size.to_bytes(8, "little"), call
