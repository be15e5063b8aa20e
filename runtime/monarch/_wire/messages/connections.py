"""The first messages of a connection, and where hosts listen for each other."""

from __future__ import annotations

from monarch._wire.messages.base import Message


class Hello(Message, tag=0):
    """First message on a connection: the sender and its version."""

    version: int
    proc: str
    pid: int


class Refused(Message, tag=1):
    """Answer to a Hello of another version, and to Hosts with a token, which it repeats, of a program not served."""

    version: int
    proc: str
    reason: str
    token: str = ""


class Hosts(Message, tag=17):
    """Where the hosts of a session listen for each other, for an agent: address and public key by host id.

    The controller has an entry of its own, by its proc id.
    """

    hosts: dict[str, tuple[str, str]]
    token: str = ""
    """Correlation token, echoed in the Listening reply; empty for none."""


class Listen(Message, tag=19):
    """Asks an agent to listen on tcp too, because other hosts have joined; answered by Listening."""

    src: str
    address: str
    """As in ``tcp://127.0.0.1``, without the port."""
    allowed: list[str]
    """Public keys that may connect."""


class Listening(Message, tag=20):
    """Where an agent listens: for its owner, and for other agents."""

    src: str
    owner_address: str
    peer_address: str
    public: str
    token: str = ""


class Bye(Message, tag=18):
    """The owner of an agent ends it, and all of its procs."""

    src: str
