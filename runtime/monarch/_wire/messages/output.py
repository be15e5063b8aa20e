"""Output, log records and reports of ranks."""

from __future__ import annotations

from monarch._wire.messages.base import Message


class Output(Message, tag=6):
    """Output of a rank: stream, offset in it and bytes of each piece, and the call that was running."""

    src: str
    actor: str
    method: str
    caller: str
    port: int
    pieces: list[tuple[str, int, bytes]]


class OutputCredit(Message, tag=30):
    """Output of the receiver was taken: it may send as much more."""

    src: str
    count: int
    """Bytes, and 512 more for each line."""


class Level(Message, tag=23):
    """The minimum level of log records that a rank writes."""

    src: str
    level: int


class Report(Message, tag=28):
    """The state of a rank and what it has logged: to its agent, or what it has logged to an owner on its host."""

    src: str
    state: bytes
    """Its packed RankReport; empty if that has not changed."""
    more: list[bytes]
    """Packed Metrics and Progress."""
    urgent: bool = False
    """Whether an answer follows, so that the agent sends it on at once."""


class Reports(Message, tag=29):
    """Reports that an agent gathered for the owner of the ranks: the newest state of each, and all that they logged."""

    src: str
    now: float
    """Seconds since the epoch on the clock of the host."""
    parts: list[tuple[str, bytes, list[bytes]]]
    """As in Report."""
