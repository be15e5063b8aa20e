"""Messages that go from host to host, and their replies on the way back."""

from __future__ import annotations

from monarch._wire.messages.base import Message


class Spread(Message, tag=32):
    """Carries the ``frames`` that follow to procs of many hosts, from agent to agent; like a Cast for each host.

    The agent that gets it serves the first host and passes it on to the others.
    """

    src: str
    port: int
    """Port whose replies are gathered; 0 for none."""
    via: str
    """The agent that folds the replies; empty if they go to ``src``."""
    fan: int
    """The most agents that each agent passes it on to; 0 to pass it to all others, and to fold their replies."""
    hosts: bytes
    """Packed, so that it can be sent again as it is: of each host, its id and the procs."""
    numbers: list[int]
    """Of each host, the number of this message as in Ordered, or 0 for any order."""
    heard: list[tuple[int, list[int]]]
    """By the place of a host in ``hosts``, the numbers of its Answers that have arrived."""
    frames: int


class Answers(Message, tag=33):
    """Replies of the ranks of a host to a Spread, for the agent that folds them; ``parts`` as in Batch."""

    src: str
    dst: str
    """The caller."""
    port: int
    number: int
    """Counts those of this agent for the caller, who acknowledges it in a later Spread."""
    last: bool
    """Whether no rank of the host owes a reply any more."""
    parts: list[int]
    frames: int
    received: int = 0
    """As in Received, which is not sent then; 0 if unknown."""


class Folded(Message, tag=34):
    """Replies of many hosts, equal ones once; others follow as ``frames``, with ``parts`` as in Batch."""

    src: str
    port: int
    hosts: list[tuple[str, int, int]]
    """Of each Answers in it: the host, ``number`` and ``received``."""
    groups: list[tuple[int, int, bytes, list[int]]]
    """``status``, ``done`` and ``body`` of equal replies, and the positions of the ranks: ranges, of each its begin and
    its end."""
    parts: list[int]
    frames: int
