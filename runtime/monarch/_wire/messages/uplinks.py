"""Messages from hosts to the program by way of one another."""

from __future__ import annotations

import msgspec

from monarch._wire.messages.base import Message


class Uplink(Message, tag=36):
    """Tells an agent how its output, reports and news of starts reach the program."""

    src: str
    via: str
    """The agent that merges them with those of others, which may be the receiver; empty to send them straight."""
    relayed: bool = False
    """Whether all other messages go by it as well, both ways, once the receiver has said so by Relayed."""
    turn: int = 0
    """Counts those of the receiver."""


class Relayed(Message, tag=40):
    """The program may close its connection to an agent, which holds on to another one; or must open it again."""

    src: str
    via: str
    """The agent of the Uplink; empty if the connection to it is lost, and the program must open its own."""
    turn: int
    """Of the newest Uplink."""


class Upward(Message, tag=37):
    """Carries a message for the program: to the agent that merges it with those of other hosts, or straight."""

    src: str
    dst: str
    """The program."""
    number: int
    """Counts those of this agent, which keeps them until they are taken; 0 for one that it does not keep."""
    body: bytes
    """An encoded message, of which more may follow as ``frames``; empty to ask only what has been taken."""
    frames: int = 0


class MergedOutput(msgspec.Struct, array_like=True, gc=False):
    """Equal output of some ranks, as in Output."""

    actor: str
    method: str
    caller: str
    port: int
    pieces: list[tuple[str, bytes]]
    """Stream and bytes."""
    members: list[tuple[list[int], list[str]]]
    """Proc ids, by the offsets of the pieces in their streams."""


class Merged(Message, tag=38):
    """Messages of many hosts for the program, equal output once."""

    src: str
    number: int
    """As in Upward, counted with those."""
    outputs: list[MergedOutput]
    others: list[tuple[str, int, bytes]]
    """Host, ``number`` and ``body`` as in Upward."""


class Taken(Message, tag=39):
    """Messages of the receiver up to this number, as in Upward and Merged, have reached the program."""

    src: str
    number: int
