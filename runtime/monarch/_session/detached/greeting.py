"""The first exchange with the hosts of a detached mesh, all at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from monarch._procs.agent.detached_records import Record, RecordedHost
from monarch._procs.launch.holding.held import HeldLaunch
from monarch._procs.session_folder import host_of
from monarch._session.detached.agents import PATIENCE_S
from monarch._session.greeting import AgentAddress, Refusal
from monarch._session.session import Session
from monarch._wire.handshake import Handshake
from monarch._wire.keys import KeyPair
from monarch._wire.messages import Listening
from monarch._wire.tcp import unreachable
from monarch.exceptions import MonarchError, NoDetachedMeshError, SpawnError

_Reasons: TypeAlias = "list[tuple[RecordedHost, str]]"


@dataclass
class UnavailableHosts:
    """The hosts of a mesh that this program cannot use now, with the reasons.

    Attributes:
        ended: those whose machines refuse connections: their agents have ended.
        unreachable: those to which there is no connection; they may be back later.
        refusing: those that have refused this program.
        silent: those that are there, but do not answer.
    """

    ended: _Reasons = field(default_factory=list[tuple[RecordedHost, str]])
    unreachable: _Reasons = field(default_factory=list[tuple[RecordedHost, str]])
    refusing: _Reasons = field(default_factory=list[tuple[RecordedHost, str]])
    silent: list[RecordedHost] = field(default_factory=list[RecordedHost])

    @property
    def hosts(self) -> list[RecordedHost]:
        """All of them."""
        return [*(host for host, _ in [*self.ended, *self.unreachable, *self.refusing]), *self.silent]

    @property
    def all_ended(self) -> bool:
        """Whether none of them can answer later."""
        return not self.silent and not self.refusing and not self.unreachable

    def problems(self) -> list[str]:
        """Describe them, with one sentence for all that are silent."""
        lines = [f"host {host.name} does not answer: {why}" for host, why in [*self.ended, *self.unreachable]]
        lines += [f"host {host.name} refuses this program: {why}" for host, why in self.refusing]
        if len(self.silent) == 1:
            (host,) = self.silent
            lines.append(
                f"host {host.name} does not answer: its agent at {host.address} is running, but has not answered for "
                f"{PATIENCE_S:g} s; it may be suspended or overloaded; leave the mesh, and attach it again "
                f"when the host responds"
            )
        elif self.silent:
            names = [f"{host.name} at {host.address}" for host in self.silent]
            lines.append(
                f"hosts {_list(names)} do not answer: their agents are running, but have not answered for "
                f"{PATIENCE_S:g} s; they may be suspended or overloaded; attach the mesh again when they respond"
            )
        return lines


def greet_here(session: Session, record: Record, keys: KeyPair) -> Listening:
    """Connect to the agent of a mesh on this machine, and return where it listens.

    Raises:
        NoDetachedMeshError: it does not answer.
        MonarchError: another one listens there.
    """
    (host,) = record.hosts
    (answer,) = session.greet([AgentAddress(host.address)], keys, PATIENCE_S)
    if isinstance(answer, Refusal):
        if answer.has_other_key:
            raise NoDetachedMeshError(
                f"the detached mesh {record.name!r} did not answer at {host.address}: the process there has "
                f"a different key"
            )
        if answer.final:
            raise MonarchError(f"detached mesh {record.name!r} cannot be attached: {answer.reason}")
        raise NoDetachedMeshError(
            f"the detached mesh {record.name!r} did not answer at {host.address} within {PATIENCE_S:g} s; its agent is "
            f"process {record.pid}: 'kill -CONT {record.pid}' resumes it if it is suspended, and "
            f"'kill -9 {record.pid}' ends it with its ranks"
        )
    return _checked(record, host, answer)


def greet_hosts(
    session: Session, record: Record, keys: KeyPair, launch: HeldLaunch, local: Sequence[str]
) -> tuple[list[Listening], UnavailableHosts]:
    """Connect to the agents of all hosts of a mesh, and return where they listen, and those that are unavailable.

    Args:
        session: of this program.
        record: that of the mesh.
        keys: of the mesh.
        launch: the connection to the process that holds the hosts.
        local: the addresses of this program and of its agent, for hosts with forwarded ports.
    """
    unavailable = UnavailableHosts()
    joined = {host_of(each.listening.src): each for each in launch.joined}
    asked: dict[str, AgentAddress] = {}
    straight: list[str] = []
    for host in record.hosts:
        try:
            route = launch.connect(joined[host.id], local)
        except SpawnError as error:
            unavailable.unreachable.append((host, str(error)))
            continue
        if route.here:
            session.attach_forwarded(joined[host.id].listening, [route.here[address] for address in local])
        else:
            straight.append(route.address)
        asked[host.id] = AgentAddress(route.address, route.here[local[0]] if route.here else "")
    reasons = unreachable(straight)
    for host in record.hosts:
        why = reasons.get(asked[host.id].address) if host.id in asked else None
        if why is not None:
            kind = unavailable.ended if why.refused else unavailable.unreachable
            kind.append((host, f"{asked[host.id].address}: {why.reason}"))
    reachable = {id: agent for id, agent in asked.items() if agent.address not in reasons}
    answers = dict(zip(reachable, session.greet(list(reachable.values()), keys, PATIENCE_S, patient=True), strict=True))
    peers = {id: each.listening.peer_address for id, each in joined.items()}
    return _sort(record, answers, peers, unavailable), unavailable


def _sort(
    record: Record, answers: Mapping[str, Listening | Refusal], peers: Mapping[str, str], unavailable: UnavailableHosts
) -> list[Listening]:
    """Return where the hosts listen that have answered, and add the others to those that are unavailable."""
    known: list[Listening] = []
    for host in record.hosts:
        answer = answers.get(host.id)
        if isinstance(answer, Listening):
            known.append(_checked(record, host, msgspec.structs.replace(answer, peer_address=peers[host.id])))
        elif answer is not None and answer.has_other_key:
            # Its agent may have ended; but a proxy or another machine at its address is no proof of that.
            unavailable.unreachable.append((host, f"another process listens at {host.address}"))
        elif answer is not None and answer.final:
            unavailable.refusing.append((host, answer.reason))
        elif answer is not None and answer.handshake is Handshake.CLOSED:
            unavailable.unreachable.append((host, f"connections to {host.address} are closed immediately"))
        elif answer is not None:
            unavailable.silent.append(host)
    return known


def _checked(record: Record, host: RecordedHost, listening: Listening) -> Listening:
    if host_of(listening.src) != host.id:
        raise MonarchError(f"{listening.src} answered at {host.address}, not the detached mesh {record.name!r}")
    return listening


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
