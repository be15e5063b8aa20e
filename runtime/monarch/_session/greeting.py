"""The first exchange with agents that this program knows by address alone: workers, and hosts of detached meshes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq

from monarch._node.future import Promise
from monarch._node.node import Node
from monarch._wire import messages as m
from monarch._wire.handshake import Handshake, HandshakeProbe
from monarch._wire.keys import KeyPair
from monarch._wire.links import Link
from monarch._wire.tcp import Unreachable, unreachable
from monarch.exceptions import CallTimeoutError, SpawnError

_RETRY_S = 0.25
"""Seconds between requests to an agent that does not answer."""
_REFUSAL_S = 1.0
"""Seconds for which a refusal stands before it counts: the agent may be about to end, and another to take its place."""
_PROBE_S = 0.5
"""Seconds of silence after which a second connection looks why: most agents answer before."""


@dataclass(frozen=True)
class AgentAddress:
    """Where an agent listens.

    Attributes:
        address: its address.
        return_address: the address of this program as the agent connects to it; empty for the one that others use.
    """

    address: str
    return_address: str = ""


@dataclass(frozen=True)
class Refusal:
    """The end of an exchange without an answer.

    Attributes:
        address: that of the agent.
        reason: why it was refused, for people, with what to do; empty if there was only silence.
        has_other_key: whether a process refused it that has not the key of the agent.
        handshake: the state of a second connection; None if none was made.
        back: the address of this program to which the agent was to connect.
    """

    address: str
    reason: str
    has_other_key: bool
    handshake: Handshake | None
    back: str = ""

    @property
    def final(self) -> bool:
        """Whether somebody there has refused, so that more patience does not help."""
        return bool(self.reason)


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
        agent: its address.
        keys: the pair that both have.
        own: the address of this program and its public key.
    """

    def __init__(
        self, node: Node, greetings: Greetings, agent: AgentAddress, keys: KeyPair, own: tuple[str, str]
    ) -> None:
        self.agent = agent
        self.listening: m.Listening | None = None
        self.adopted = False
        """Whether its connection is used further."""
        self._node, self._greetings, self._keys = node, greetings, keys
        self._own = (agent.return_address or own[0], own[1])
        self.link = Link(node.hosts.context, agent.address, node.hosts.hello, keys, keys.public, node.hosts.lease)
        self._probe: HandshakeProbe | None = None
        self._begun = time.monotonic()
        self._token = secrets.token_hex(8)
        """Of all its questions: a late answer counts too."""
        self._answer: Promise[m.Listening] | None = None
        """Not read yet."""
        self._reason = ""
        """Why it was refused, the last time."""
        self._since: float | None = None
        """When it was refused first, in monotonic seconds; None while it is not."""

    def ask(self) -> None:
        """Ask the agent who it is. An earlier question may have been lost with an agent that has ended."""
        if self._answer is None:
            self._answer = self._greetings.open(self._token, self.agent.address)
        self.link.offer(self._node.hosts.hello)
        self.link.offer(m.encode(m.Hosts({self._node.proc: self._own}, self._token)))

    def wait(self, until: float) -> m.Listening | None:
        """Return the answer, waiting until a monotonic time; None if there is none."""
        assert self._answer is not None
        try:
            listening = self._answer.get(max(0.0, until - time.monotonic()))
        except CallTimeoutError:
            self._look()
            return None
        except _RefusedError as refused:
            self._answer = None
            self._refuse(str(refused))
            return None
        self._answer = None
        self._since = None
        return listening

    @property
    def stands(self) -> bool:
        """Whether a refusal stands."""
        return self._since is not None and time.monotonic() >= self._since + _REFUSAL_S

    def refusal(self) -> Refusal:
        """Return why there is no answer, as far as it is known."""
        self._look()
        state = None
        with suppress(OSError):
            state = self._probe.look() if self._probe is not None else None
        other = state in (Handshake.REJECTED, Handshake.FOREIGN)
        refused = self._since is not None
        return Refusal(self.agent.address, self._reason if refused else "", refused and other, state, self._own[0])

    def _look(self) -> None:
        """Look why there is no answer."""
        if self._probe is None:
            if time.monotonic() >= self._begun + _PROBE_S:
                # Without descriptors left there is no second one, and no reason then.
                with suppress(zmq.ZMQError, OSError):
                    context, lease = self._node.hosts.context, self._node.hosts.lease
                    self._probe = HandshakeProbe(context, self.agent.address, self._keys, self._keys.public, lease)
            return
        try:
            state = self._probe.look()
        except OSError:
            # A module that reads events cannot be imported without descriptors.
            return
        if state is Handshake.REJECTED:
            self._refuse("it uses a different key; use the key file of that worker")
        elif state is Handshake.FOREIGN:
            self._refuse("the process there is not a worker; correct the address, or start a worker there")
        elif state is Handshake.NOWHERE:
            # Whoever refused has ended.
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
    greetings: Sequence[Greeting], timeout: float, has_ended: Callable[[str], bool], patient: bool
) -> list[m.Listening | Refusal]:
    """Return the answer of each agent, asking all at the same time.

    Args:
        greetings: the exchanges.
        timeout: seconds until those that have not answered are given up.
        has_ended: whether the agent of this id is ending: its answer does not count.
        patient: whether to wait for the others when one has refused.
    """
    deadline = time.monotonic() + timeout
    pending = list(greetings)
    while True:
        for each in pending:
            each.ask()
        until = min(deadline, time.monotonic() + _RETRY_S)
        for each in pending:
            known = each.wait(until)
            if known is not None and not has_ended(known.src):
                each.listening = known
        pending = [each for each in pending if each.listening is None]
        refused = [each for each in pending if each.stands]
        if not pending or time.monotonic() >= deadline or (refused and (len(refused) == len(pending) or not patient)):
            return [each.listening or each.refusal() for each in greetings]
        # A refusal comes at once, and the agent has others to serve.
        time.sleep(max(0.0, until - time.monotonic()))


def reasons_of_silence(silent: Sequence[Refusal]) -> list[str]:
    """Return why these agents have not answered, and what to do; all are looked at together, for 2 s at most."""
    nowhere = unreachable([each.address for each in silent if each.handshake is not Handshake.DONE])
    return [_silence(each, nowhere.get(each.address)) for each in silent]


def _silence(refusal: Refusal, nowhere: Unreachable | None) -> str:
    if refusal.handshake is Handshake.DONE:
        return (
            f"a process with this key listens there but has not answered; it may be suspended ('kill -CONT PID' "
            f"resumes it), be an older version that gives no reason, or be unable to connect to this program at "
            f"{refusal.back} (interface= selects another address of this machine)"
        )
    if nowhere is not None:
        return f"{nowhere.reason}; start a worker there, or correct the address"
    if refusal.handshake is Handshake.CLOSED:
        return (
            "connections are accepted there and closed immediately, which a forwarded port or a proxy does without a "
            "worker behind it; start the worker, or correct the address"
        )
    return "a process accepts connections there, but does not answer; it may be suspended, or not a worker"
