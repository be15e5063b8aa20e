"""Service requests, which processes answer even if their actors are busy, and signals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from monarch._core.roster import split_proc
from monarch._core.shapes.extent import Extent
from monarch._node.current import current_node
from monarch._node.future import Future
from monarch._node.node_like import NodeLike
from monarch._node.peers.peer import Peer
from monarch._node.remote_errors import unpack_failure
from monarch._node.replies.gather import Gather
from monarch._node.services.frame import ask_frame, ask_ranks, send_to_all
from monarch._node.services.registry import ServiceRequest, request
from monarch._procs.agent.services import AgentRequest
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.plain import loads_plain

P = ParamSpec("P")
R = TypeVar("R")
_ALL = 0.2
"""Seconds for all processes to answer."""
_ONE = 0.3
"""More seconds for the first answer, on a busy machine."""


def ask_proc(proc: str, service: Callable[P, R], *args: P.args, **named: P.kwargs) -> Future[R]:
    """Ask one process for a service and return a future of its answer."""
    node = current_node()
    gather: Gather[R] = Gather(node, [node.peers.get(proc)], Extent((), ()), proc, "", lambda _, values: values[0])
    gather.targets[0].send(ask_frame(node, request(service, *args, **named), gather.port))
    gather.check()
    return gather


def tell_proc(node: NodeLike, proc: str, service: Callable[P, Any], *args: P.args, **named: P.kwargs) -> None:
    """Ask one process for a service without waiting; its error counts as a mishap there."""
    node.peers.get(proc).send(ask_frame(node, request(service, *args, **named), 0))


def tell_agent(node: NodeLike, host: str, asked: AgentRequest) -> None:
    """Send a request to the agent of a host without waiting."""
    node.peers.get(f"{host}/agent").send(asked.frame(node.proc, 0))


class ServiceAnswers:
    """Asks processes for a service and handles answers one by one, even if some never come.

    Args:
        node: the node of this process.
        procs: the processes.
        asked: the service with its arguments.
        heard: called with each answer in the receiving thread; an error is a Failure.
        urgent: whether somebody waits, so that no host that hangs may delay the request.
    """

    def __init__(
        self,
        node: NodeLike,
        procs: Sequence[str],
        asked: ServiceRequest | AgentRequest,
        heard: Callable[[str, Any], None] = lambda proc, answer: None,
        urgent: bool = False,
    ) -> None:
        self._node = node
        self._heard = heard
        self._load = m.unpack if isinstance(asked, AgentRequest) else loads_plain
        self._port = node.ports.open(self)
        self.targets: Mapping[int, Peer] = {}
        """By the positions in answers that were folded on their way."""
        peers = [node.peers.get(proc) for proc in procs]
        if isinstance(asked, AgentRequest):
            self._ask_agents(peers, asked.frame(node.proc, self._port))
        else:
            self.targets = {split_proc(peer.proc)[1]: peer for peer in peers}
            ask_ranks(node, asked, self._port, peers)
        if urgent:
            node.hosts.hurry(peer.host for peer in peers if peer.dead is None)

    def _ask_agents(self, agents: Sequence[Peer], frame: bytes) -> None:
        if self._node.hosts.spreads.least:
            send_to_all(self._node, agents, frame, self._port)
            return
        for agent in agents:
            if agent.dead is None:
                agent.send(frame)

    def reply(self, reply: m.Reply, _: Any) -> None:
        """Take an answer."""
        answer = self._load(reply.body) if reply.status == m.RESULT else unpack_failure(reply.body)
        self._heard(reply.src, answer)

    def close(self) -> None:
        """Take no more answers."""
        self._node.ports.close(self._port)


def ask_soon(procs: Sequence[str], asked: ServiceRequest | AgentRequest, patience: float = _ALL) -> dict[str, Any]:
    """Return the answers of the processes that answer soon, by process; an error is a Failure."""
    answers: dict[str, Any] = {}
    answered, all_answered = threading.Event(), threading.Event()

    def heard(proc: str, answer: Any) -> None:
        answers[proc] = answer
        answered.set()
        if len(answers) == len(procs):
            all_answered.set()

    asking = ServiceAnswers(current_node(), procs, asked, heard, urgent=True)
    try:
        if procs and not all_answered.wait(patience):
            answered.wait(_ONE)
    finally:
        asking.close()
    return dict(answers)


def send_signal(node: NodeLike, procs: Iterable[str], number: int) -> None:
    """Send a signal to processes, with one message per host."""
    hosts: dict[str, list[str]] = {}
    for proc in procs:
        hosts.setdefault(host_of(proc), []).append(proc)
    for host, members in hosts.items():
        node.peers.to_agent(host, m.Signal(node.proc, members, number))
    node.hosts.hurry(hosts)
