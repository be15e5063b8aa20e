"""Dispatch of frames to the handlers of their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq

from monarch._node.mishaps import Mishaps
from monarch._wire import messages as m
from monarch._wire.links import Inbox
from monarch._wire.split import join
from monarch.exceptions import ProtocolError

M = TypeVar("M")
Handler = Callable[[Any, Sequence[Any]], object]

_FRAMED = frozenset({m.Call, m.Create, m.Reply, m.Batch, m.Split, m.Folded, m.Upward})


class Dispatch:
    """Passes each message to the handler registered for its kind; in the receiving thread.

    Args:
        inbox: the socket that frames are read from.
        mishaps: told of undecodable frames and of handlers that raise.
    """

    def __init__(self, inbox: Inbox, mishaps: Mishaps) -> None:
        self._socket = inbox.socket
        self.mishaps = mishaps
        self.handlers: dict[type, Handler] = {m.Batch: self._batch, m.Split: self._split}
        """Written before the process receives, and by the leader."""

    def handle(self, kind: type[M], handler: Callable[[M, Sequence[Any]], object]) -> None:
        """Register the handler of a kind of message. It runs in the receiving thread, so it never waits."""
        self.handlers[kind] = handler

    def on_frame(self, frame: bytes) -> None:
        """Handle the message that a received frame begins."""
        try:
            try:
                # No function of Python, since it runs for each message.
                message: Any = m.decode_raw(frame)
            except m.UNREADABLE:
                # Again, for its ProtocolError.
                message = m.decode(frame)
            # A union of all messages.
            kind: type = type(message)  # pyright: ignore[reportUnknownVariableType]
            handler = self.handlers.get(kind) or self._handler_of(message)
            more: Sequence[Any] = ()
            if kind in _FRAMED and message.frames:
                more = self._rest(message)
        except ProtocolError as error:
            self._drop_rest()
            self.mishaps.undecodable(error)
            return
        except MemoryError:
            self._drop_rest()
            raise
        try:
            handler(message, more)
        except Exception as error:
            self._drop_rest()
            self.mishaps.failed(message, error)

    def deliver(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        """Handle a message of this process itself, or one inside another."""
        self.take(m.decode(frame), more)

    def take(self, message: m.AnyMessage, more: Sequence[Any] = ()) -> None:
        """Handle a decoded message."""
        try:
            self._handler_of(message)(message, more)
        except Exception as error:
            self.mishaps.failed(message, error)

    def _handler_of(self, message: m.AnyMessage) -> Handler:
        handler = self.handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"this process does not handle {type(message).__name__}")
        return handler

    def _rest(self, message: Any) -> list[Any]:
        """Return the frames that follow the first one of a message."""
        number: int = message.frames
        socket = self._socket
        more: list[Any] = []
        left = socket.get(zmq.RCVMORE)
        while left:
            part = socket.recv(copy=False)
            more.append(part.buffer)
            left = part.more
        if len(more) != number:
            raise ProtocolError(f"expected a message of {number + 1} frames, got {len(more) + 1}")
        return more

    def _drop_rest(self) -> None:
        """Drop the remaining frames of an undecodable message."""
        while self._socket.get(zmq.RCVMORE):
            self._socket.recv(copy=False)

    def _batch(self, batch: m.Batch, more: Sequence[Any]) -> None:
        if sum(batch.parts) != len(more):
            raise ProtocolError(f"expected a batch of {sum(batch.parts)} frames, got {len(more)}")
        at = 0
        for size in batch.parts:
            try:
                self.deliver(more[at], more[at + 1 : at + size])
            except ProtocolError as error:
                # The other messages of the batch are good.
                self.mishaps.undecodable(error)
            at += size

    def _split(self, message: m.Split, pieces: Sequence[Any]) -> None:
        frames = join(message, pieces)
        self.deliver(bytes(frames[0]), frames[1:])
