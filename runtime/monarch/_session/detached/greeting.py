"""The first exchange with the hosts of a detached mesh, all at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from monarch._procs.agent.detached_records import Record, RecordedHost
from monarch._procs.launch.holding.held import HeldLaunch
from monarch._procs.session_folder import host_of
from monarch._session.detached.agents import PATIENCE_S
from monarch._session.greeting import Address, Refusal
from monarch._session.session import Session
from monarch._wire.keys import KeyPair
from monarch._wire.messages import Listening
from monarch._wire.tcp import unreachable
from monarch.exceptions import MonarchError, NoDetachedMeshError, SpawnError


@dataclass
class Lack:
    """The hosts of a mesh that this program cannot use now.

    Attributes:
        unreachable: those to which there is no connection, with the reasons: their agents have ended, or the machines.
        refusing: those that have refused this program, with the reasons.
        silent: those that are there, but do not answer.
    """

    unreachable: list[tuple[RecordedHost, str]] = field(default_factory=list[tuple[RecordedHost, str]])
    refusing: list[tuple[RecordedHost, str]] = field(default_factory=list[tuple[RecordedHost, str]])
    silent: list[RecordedHost] = field(default_factory=list[RecordedHost])

    @property
    def hosts(self) -> list[RecordedHost]:
        """All of them."""
        return [*(host for host, _ in [*self.unreachable, *self.refusing]), *self.silent]

    @property
    def ended(self) -> bool:
        """Whether none of them can answer later."""
        return not self.silent and not self.refusing

    def problems(self) -> list[str]:
        """Describe them, one sentence for all that lack the same."""
        told = [f"host {host.name} does not answer: {why}" for host, why in self.unreachable]
        told += [f"host {host.name} refuses this program: {why}" for host, why in self.refusing]
        if len(self.silent) == 1:
            (host,) = self.silent
            told.append(
                f"host {host.name} does not answer: its agent at {host.address} is there, but has not answered for "
                f"{PATIENCE_S:g} s; it may be stopped, or its machine busy: attach the mesh again when it is not"
            )
        elif self.silent:
            names = [f"{host.name} at {host.address}" for host in self.silent]
            told.append(
                f"hosts {_list(names)} do not answer: their agents are there, but have not answered for {PATIENCE_S:g} "
                f"s; they may be stopped, or their machines busy: attach the mesh again when they are not"
            )
        return told


def greet_here(session: Session, record: Record, keys: KeyPair) -> Listening:
    """Connect to the agent of a mesh on this machine, and return where it listens.

    Raises:
        NoDetachedMeshError: it does not answer.
        MonarchError: another one listens there.
    """
    (host,) = record.hosts
    (answer,) = session.greet([Address(host.address)], keys, PATIENCE_S)
    if isinstance(answer, Refusal):
        if answer.replaced:
            raise NoDetachedMeshError(
                f"the detached mesh {record.name!r} did not answer at {host.address}: the process there has "
                f"another key than its record"
            )
        if answer.final:
            raise MonarchError(f"detached mesh {record.name!r} cannot be attached: {answer.reason}")
        raise NoDetachedMeshError(
            f"the detached mesh {record.name!r} did not answer at {host.address} within {PATIENCE_S:g} s; its agent is "
            f"process {record.pid}: 'kill -CONT {record.pid}' continues it if it is stopped, and "
            f"'kill -9 {record.pid}' ends it with its ranks"
        )
    return _checked(record, host, answer)


def greet_hosts(
    session: Session, record: Record, keys: KeyPair, launch: HeldLaunch, local: Sequence[str]
) -> tuple[list[Listening], Lack]:
    """Connect to the agents of all hosts of a mesh, and return where they listen, and which lack.

    Args:
        session: of this program.
        record: that of the mesh.
        keys: of the mesh.
        launch: the connection to the process that holds the hosts.
        local: the addresses of this program and of its agent, for hosts with forwarded ports.
    """
    lack = Lack()
    joined = {host_of(each.listening.src): each for each in launch.joined}
    asked: dict[str, Address] = {}
    straight: list[str] = []
    for host in record.hosts:
        try:
            route = launch.connect(joined[host.id], local)
        except SpawnError as error:
            lack.unreachable.append((host, str(error)))
            continue
        if route.here:
            session.attach_forwarded(joined[host.id].listening, [route.here[address] for address in local])
        else:
            straight.append(route.address)
        asked[host.id] = Address(route.address, route.here[local[0]] if route.here else "")
    reasons = unreachable(straight)
    lack.unreachable += [
        (host, f"{asked[host.id].address}: {reasons[asked[host.id].address]}")
        for host in record.hosts
        if host.id in asked and asked[host.id].address in reasons
    ]
    there = {id: where for id, where in asked.items() if where.address not in reasons}
    answers = dict(zip(there, session.greet(list(there.values()), keys, PATIENCE_S, patient=True), strict=True))
    return _sort(record, answers, {id: each.listening.peer_address for id, each in joined.items()}, lack), lack


def _sort(
    record: Record, answers: Mapping[str, Listening | Refusal], peers: Mapping[str, str], lack: Lack
) -> list[Listening]:
    """Return where the hosts listen that have answered, and add the others to those that lack."""
    known: list[Listening] = []
    for host in record.hosts:
        answer = answers.get(host.id)
        if isinstance(answer, Listening):
            known.append(_checked(record, host, msgspec.structs.replace(answer, peer_address=peers[host.id])))
        elif answer is not None and answer.replaced:
            # Its agent has ended, or the record is not that of the agent.
            lack.unreachable.append((host, f"another process listens at {host.address}"))
        elif answer is not None and answer.final:
            lack.refusing.append((host, answer.reason))
        elif answer is not None:
            lack.silent.append(host)
    return known


def _checked(record: Record, host: RecordedHost, listening: Listening) -> Listening:
    if host_of(listening.src) != host.id:
        raise MonarchError(f"{listening.src} answered at {host.address}, not the detached mesh {record.name!r}")
    return listening


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
