"""Messages that carry others to another host, or in pieces."""

from __future__ import annotations

from monarch._wire.messages.base import Message


class Route(Message, tag=14):
    """Carries the ``frames`` that follow to a proc on another host."""

    dst: str
    frames: int


class Cast(Message, tag=15):
    """Carries the ``frames`` that follow to many procs of one host; with a port, their replies come as one Batch."""

    src: str
    procs: list[str]
    port: int
    frames: int


class Batch(Message, tag=16):
    """Replies that an agent gathered; ``parts`` says how many of the following frames each has."""

    src: str
    parts: list[int]
    frames: int


class Ordered(Message, tag=31):
    """Carries the ``frames`` that follow to an agent, which handles the messages of ``src`` in the order of their
    numbers: they come by different ways."""

    src: str
    number: int
    frames: int


class Received(Message, tag=35):
    """An agent has all messages to it up to this number."""

    src: str
    number: int


class Down(Message, tag=41):
    """Carries the ``frames`` that follow to the agent of another host, by an agent that it holds on to."""

    host: str
    frames: int


class Split(Message, tag=26):
    """Carries a message with large frames in pieces; ``parts`` says how many of the following frames each has."""

    parts: list[int]
    frames: int
