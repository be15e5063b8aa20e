"""The first exchange with agents that this program knows by address alone: workers, and hosts of detached meshes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from monarch._node.future import Promise
from monarch._node.node import Node
from monarch._wire import messages as m
from monarch._wire.handshake import Handshake, Probe
from monarch._wire.keys import KeyPair
from monarch._wire.links import Link
from monarch._wire.tcp import why_unreachable
from monarch.exceptions import CallTimeoutError, SpawnError

_AGAIN = 0.25
"""Seconds between requests to an agent that does not answer."""
_SURE = 1.0
"""Seconds for which a refusal stands before it counts: the agent may be about to end, and another to take its place."""


@dataclass(frozen=True)
class Address:
    """Where an agent listens.

    Attributes:
        address: its address.
        way: the address of this program as the agent connects to it; empty for the one that others use.
    """

    address: str
    way: str = ""


@dataclass(frozen=True)
class Refusal:
    """The end of an exchange without an answer.

    Attributes:
        address: that of the agent.
        reason: why, for people, with what to do.
        final: whether somebody there has refused, so that more patience does not help.
        replaced: whether that was a process without the key, not the one that was asked for.
    """

    address: str
    reason: str
    final: bool
    replaced: bool


class _RefusedError(SpawnError):
    """An agent has answered that it does not serve this program."""


class Greetings:
    """The exchanges of a program that are under way.

    Args:
        node: of the program.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._open: dict[str, Promise[m.Listening]] = {}
        """By token, those without an answer. Single operations only."""

    def listens(self, listening: m.Listening) -> None:
        """Take the answer of an agent; in the receiving thread."""
        answer = self._open.get(listening.token)
        if answer is not None:
            answer.complete(lambda: listening)

    def refused(self, refused: m.Refused) -> bool:
        """Take the refusal of an agent, and return whether it belongs to an exchange; in the receiving thread."""
        answer = self._open.get(refused.token) if refused.token else None
        if answer is None:
            return bool(refused.token)

        def fail() -> m.Listening:
            raise _RefusedError(refused.reason)

        answer.complete(fail)
        return True

    def open(self, token: str, address: str) -> Promise[m.Listening]:
        """Return the answer to come."""
        answer = self._open[token] = Promise(self._node, f"the agent at {address}")
        return answer

    def close(self, token: str) -> None:
        """Expect no answer any more."""
        self._open.pop(token, None)


class Greeting:
    """The exchange with one agent.

    Args:
        node: of this program.
        greetings: those of the program.
        where: the agent.
        keys: the pair that both have.
        own: the address of this program and its public key.
    """

    def __init__(self, node: Node, greetings: Greetings, where: Address, keys: KeyPair, own: tuple[str, str]) -> None:
        self.where = where
        self.listening: m.Listening | None = None
        self.adopted = False
        """Whether its connection is used further."""
        self._node, self._greetings, self._keys = node, greetings, keys
        self._own = (where.way or own[0], own[1])
        self.link = Link(node.hosts.context, where.address, node.hosts.hello, keys, keys.public, node.hosts.lease)
        self._probe: Probe | None = None
        self._token = ""
        self._answer: Promise[m.Listening] | None = None
        self._reason = ""
        """Why it was refused, the last time."""
        self._since: float | None = None
        """When it was refused first, in monotonic seconds; None while it is not."""

    def ask(self) -> None:
        """Ask the agent who it is. An earlier question may have been lost with an agent that has ended."""
        self._token = secrets.token_hex(8)
        self._answer = self._greetings.open(self._token, self.where.address)
        self.link.offer(self._node.hosts.hello)
        self.link.offer(m.encode(m.Hosts({self._node.proc: self._own}, self._token)))

    def wait(self, until: float) -> m.Listening | None:
        """Return the answer to the last question, waiting until a monotonic time; None if there is none."""
        assert self._answer is not None
        try:
            listening = self._answer.get(max(0.0, until - time.monotonic()))
        except CallTimeoutError:
            self._look()
            return None
        except _RefusedError as refused:
            self._refuse(str(refused))
            return None
        finally:
            self._greetings.close(self._token)
        self._since = None
        return listening

    @property
    def reason(self) -> str:
        """Why it was refused the last time; empty if it was not."""
        return self._reason if self._since is not None else ""

    @property
    def replaced(self) -> bool:
        """Whether a process without the key has ended the connection."""
        ended = self._probe is not None and self._probe.state in (Handshake.REJECTED, Handshake.FOREIGN)
        return ended and self._since is not None

    @property
    def stands(self) -> bool:
        """Whether a refusal stands."""
        return self._since is not None and time.monotonic() >= self._since + _SURE

    def why_silent(self) -> str:
        """Return why there is no answer, as far as is known, and what to do."""
        state = self._probe.look() if self._probe is not None else Handshake.NOWHERE
        if state is Handshake.DONE:
            return (
                "a process with this key listens there, but it has not answered; it may be stopped, or have a version "
                "that does not tell why it refuses: 'kill -CONT PID' continues one that is stopped"
            )
        why = why_unreachable(self.where.address)
        if why:
            return f"{why}; start a worker there, or correct the address"
        return "something accepts connections there, but has not answered; it may be stopped, or no worker"

    def _look(self) -> None:
        """Look why there is no answer."""
        if self._probe is None:
            context, lease = self._node.hosts.context, self._node.hosts.lease
            self._probe = Probe(context, self.where.address, self._keys, self._keys.public, lease)
            return
        state = self._probe.look()
        if state is Handshake.REJECTED:
            self._refuse("it has another key; use the key file of that worker")
        elif state is Handshake.FOREIGN:
            self._refuse("something else than a worker listens there; correct the address, or start a worker there")
        else:
            self._since = None

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        if self._since is None:
            self._since = time.monotonic()

    def close(self) -> None:
        """End the exchange."""
        self._greetings.close(self._token)
        if self._probe is not None:
            self._probe.close()
        if not self.adopted:
            self.link.close()


def answers_of(
    greetings: Sequence[Greeting], timeout: float, ended: Sequence[str], patient: bool
) -> list[m.Listening | Refusal]:
    """Return the answer of each agent, asking all at the same time.

    Args:
        greetings: the exchanges.
        timeout: seconds until those that have not answered are given up.
        ended: ids of agents that are ending, whose answers do not count.
        patient: whether to wait for the others when one has refused.
    """
    deadline = time.monotonic() + timeout
    pending = list(greetings)
    while pending and time.monotonic() < deadline:
        for each in pending:
            each.ask()
        until = min(deadline, time.monotonic() + _AGAIN)
        for each in pending:
            known = each.wait(until)
            if known is not None and known.src not in ended:
                each.listening = known
        pending = [each for each in pending if each.listening is None]
        refused = [each for each in pending if each.stands]
        if refused and (len(refused) == len(pending) or not patient):
            break
    return [
        each.listening
        or Refusal(each.where.address, each.reason or each.why_silent(), bool(each.reason), each.replaced)
        for each in greetings
    ]
