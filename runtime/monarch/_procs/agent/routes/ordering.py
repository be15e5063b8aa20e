"""The order of messages that reach an agent by different ways: from their sender itself, and by way of other agents."""

from __future__ import annotations

from collections.abc import Callable

from monarch._wire.messages import Received

_OFTEN = 64
"""Messages after which their arrival is told at once."""
_SOON = 1.0
"""Seconds after which it is told in any case."""


class _Stream:
    """The messages of one sender."""

    __slots__ = ("early", "last", "told", "waits")

    def __init__(self) -> None:
        self.last = 0
        """Number of the last message that was handled."""
        self.early: dict[int, Callable[[], None]] = {}
        """Messages that came before those with smaller numbers."""
        self.told = 0
        """Number up to which the sender has been told that all have arrived."""
        self.waits = False


class Ordering:
    """Handles the messages of each sender once, in the order of their numbers.

    Args:
        proc: id of the agent.
        later: runs a function after some seconds.
        tell: sends a message to a process.
    """

    def __init__(
        self,
        proc: str,
        later: Callable[[float, Callable[[], None]], None],
        tell: Callable[[str, Received], None],
    ) -> None:
        self._proc = proc
        self._later = later
        self._tell = tell
        self._streams: dict[str, _Stream] = {}

    def take(self, src: str, number: int, handle: Callable[[], None]) -> None:
        """Handle a message when all before it have been; drop it if it was handled before.

        Args:
            src: the sender.
            number: the number of the message, from 1; 0 for a message that may be handled at any time.
            handle: raises nothing.
        """
        if not number:
            handle()
            return
        stream = self._streams.get(src)
        if stream is None:
            stream = self._streams[src] = _Stream()
        if number <= stream.last:
            # Sent once more because the way that it took first was thought to be lost. The answer that told its arrival
            # may be lost as well.
            stream.told = min(stream.told, number - 1)
            self._told_later(src, stream)
            return
        stream.early[number] = handle
        while (following := stream.early.pop(stream.last + 1, None)) is not None:
            stream.last += 1
            following()
        self._told_later(src, stream)

    def told(self, src: str) -> int:
        """Return the number up to which all messages of a sender have arrived, for an answer that tells it."""
        stream = self._streams.get(src)
        if stream is None:
            return 0
        stream.told = stream.last
        return stream.last

    def say(self, src: str) -> None:
        """Tell a sender now which of its messages have arrived."""
        stream = self._streams.get(src)
        if stream is not None:
            self._say(src, stream)

    def _told_later(self, src: str, stream: _Stream) -> None:
        if not stream.told or stream.last - stream.told >= _OFTEN:
            self._say(src, stream)
        elif not stream.waits:
            stream.waits, last = True, stream.last
            self._later(_SOON, lambda: self._due(src, stream, last))

    def _due(self, src: str, stream: _Stream, last: int) -> None:
        stream.waits = False
        if stream.told < last:
            self._say(src, stream)
        elif stream.told < stream.last:
            # An answer has told what waited so long; one may be coming for what has arrived since.
            self._told_later(src, stream)

    def _say(self, src: str, stream: _Stream) -> None:
        stream.told = stream.last
        self._tell(src, Received(self._proc, stream.last))
