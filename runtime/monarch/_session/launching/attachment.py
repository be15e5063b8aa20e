"""The attachment of the hosts that have joined to the program."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from monarch._core.text.counts import count_text
from monarch._procs.launch.interface import Joined, Launch
from monarch._procs.session_folder import host_of
from monarch._session.greeting import AgentAddress, Refusal, reasons_of_silence
from monarch._session.launching.waiting import Tell
from monarch._session.session import Session
from monarch._wire.keys import KeyPair
from monarch._wire.messages import Listening
from monarch.exceptions import ArgumentError, SpawnError

LOOPBACK = "127.0.0.1"
_NAMED = 4
"""Workers that a line names."""

WORKER_S = 30.0
_FIRST_S = 2.0
"""Seconds for the first worker alone."""


class Attachment:
    """The attachment of hosts that have joined.

    Args:
        session: the session of this program.
        launch: that of the hosts.
        keys: the keys of this program.
        interface: the address of this machine for them, if known.
        patience: seconds for a worker to answer.
        tell: called with a line at each step of the wait.
    """

    def __init__(
        self, session: Session, launch: Launch, keys: KeyPair, interface: str | None, patience: float, tell: Tell
    ) -> None:
        self._session = session
        self._launch = launch
        self._keys = keys
        self._interface = interface
        self._patience = patience
        self._tell = tell

    def attach(self, joined: Sequence[Joined]) -> tuple[str, ...]:
        """Attach hosts, and return their ids; those that it has connected to are released if it fails."""
        session = self._session
        # Before the lock: what tells may be code of the user.
        self._tell_of([each.host for each in joined if not each.listening.src])
        with session.one_attachment():
            before = {*session.node.hosts.known}
            greeted: list[Listening] = []
            try:
                return self._attach(joined, greeted)
            except BaseException:
                # Workers take nobody else while they belong to this program.
                new = [host for each in greeted if (host := host_of(each.src)) not in before]
                session.release([host for host in new if host in session.node.hosts.known], orderly=False)
                raise

    def _attach(self, joined: Sequence[Joined], greeted: list[Listening]) -> tuple[str, ...]:
        session, keys = self._session, self._keys
        here = self._here(joined)
        session.listen(keys, here, [each.listening.public for each in joined])
        local: list[str] = []
        if self._launch.forwarded:
            local = session.open_here(keys, here, [each.listening.public for each in joined])
        unknown = [AgentAddress(self._launch.connect(each, local).address) for each in joined if not each.listening.src]
        self._greet(unknown, greeted)
        workers = iter(greeted)
        listening: list[Listening] = []
        for each in joined:
            known = each.listening
            if not known.src:
                worker = next(workers)
                # Without the protocol, a worker is called by its address.
                session.node.hosts.names.setdefault(host_of(worker.src), each.host.removeprefix("tcp://"))
                listening.append(worker)
                continue
            route = self._launch.connect(each, local)
            if each.host not in known.owner_address:
                session.node.hosts.names[host_of(known.src)] = each.host
            if route.here:
                session.attach_forwarded(known, [route.here[address] for address in local])
            listening.append(Listening(known.src, route.address, known.peer_address, known.public))
        # Otherwise the agent of this host starts when something runs here, and is introduced then.
        session.attach(listening, keys, here, own=self._launch.agent_here)
        return tuple(host_of(each.src) for each in listening)

    def _greet(self, workers: Sequence[AgentAddress], greeted: list[Listening]) -> None:
        """Connect to workers, which say which hosts they are; SpawnError if one does not serve this program."""
        answers = self._answers(workers, greeted)
        refusals = [each for each in answers if isinstance(each, Refusal)]
        final = [f"worker at {each.address}: {each.reason}" for each in refusals if each.final]
        if final:
            raise SpawnError("\n".join(final))
        if refusals:
            raise SpawnError(
                "\n".join(
                    f"no worker answered at {each.address} within {self._patience:g} s: {why}"
                    for each, why in zip(refusals, reasons_of_silence(refusals), strict=True)
                )
            )
        _check_distinct(workers, greeted)

    def _answers(self, workers: Sequence[AgentAddress], greeted: list[Listening]) -> list[Listening | Refusal]:
        """Return the answers of workers; those that serve this program are added to a list as soon as they do.

        Of programs that want the same workers at the same moment, the one that gets the first of them gets all.
        """
        until = time.monotonic() + self._patience
        first = min(range(len(workers)), key=lambda at: workers[at].address, default=0)
        others = [*workers]
        if len(workers) > 1:
            (answer,) = self._session.greet([workers[first]], self._keys, min(self._patience, _FIRST_S))
            if isinstance(answer, Listening):
                greeted.append(answer)
                del others[first]
            elif answer.final:
                return [answer]
        # A first one that is silent may still be starting, so the others are asked meanwhile.
        answers = self._session.greet(others, self._keys, max(0.0, until - time.monotonic()))
        if greeted:
            answers.insert(first, greeted[0])
        greeted[:] = [each for each in answers if not isinstance(each, Refusal)]
        return answers

    def _tell_of(self, workers: Sequence[str]) -> None:
        if workers:
            names = [*workers[:_NAMED], *["others"] * (len(workers) > _NAMED)]
            text = f"waiting up to {self._patience:g} s for {count_text(len(workers), 'worker')}: {', '.join(names)}"
            self._tell(text, False)

    def _here(self, joined: Sequence[Joined]) -> str:
        if self._interface:
            return self._interface
        if self._launch.forwarded:
            return LOOPBACK
        return local_address(joined[0].listening.owner_address)


def _check_distinct(workers: Sequence[AgentAddress], answers: Sequence[Listening]) -> None:
    """Check that no two addresses are those of one worker, such as two names of a machine."""
    found: dict[str, str] = {}
    for worker, answer in zip(workers, answers, strict=True):
        first = found.setdefault(answer.src, worker.address)
        if first != worker.address:
            raise ArgumentError(f"{first} and {worker.address} are the same worker; name it once")


def local_address(address: str) -> str:
    """Return this machine's address on the route to another one.

    Raises:
        SpawnError: the address has no route.
    """
    machine, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only selects the route.
            probe.connect((machine, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise SpawnError(f"cannot resolve or reach the worker address {address!r}: {error}") from error
