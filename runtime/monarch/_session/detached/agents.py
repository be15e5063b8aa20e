"""Requests of a program to the agents of a detached mesh."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from monarch._node.future import Future
from monarch._node.node import Node
from monarch._node.remote_errors import unpack_failure
from monarch._procs.agent.services import AgentRequest
from monarch._wire import messages as m
from monarch.exceptions import CallTimeoutError, DetachedMeshInUseError, MonarchError, NoDetachedMeshError

PATIENCE_S = 10.0
"""Seconds for an agent to answer."""


def ask_agent(node: Node, host: str, asked: AgentRequest) -> Any:
    """Send a request to the agent of a detached mesh and wait for its answer."""
    return ask_agents(node, {host: asked})[0]


def ask_agents(node: Node, requests: Mapping[str, AgentRequest]) -> list[Any]:
    """Send requests to agents of detached meshes, by host id, and wait for all answers, in that order."""
    answers: list[_Answer] = []
    for host, asked in requests.items():
        answer = _Answer(node, host, asked.name)
        answers.append(answer)
        node.peers.get(f"{host}/agent").send(asked.frame(node.proc, answer.port))
    deadline = time.monotonic() + PATIENCE_S
    try:
        return [answer.get(max(0.0, deadline - time.monotonic())) for answer in answers]
    except CallTimeoutError:
        silent = [node.hosts.name_of(answer.host) for answer in answers if not answer.done]
        hosts = f"host {silent[0]}" if len(silent) == 1 else f"hosts {', '.join(silent)}"
        raise MonarchError(
            f"connected to the detached mesh, but {hosts} did not answer within {PATIENCE_S:g} s; its agents may be "
            f"suspended, or their machines busy; try again"
        ) from None
    finally:
        for answer in answers:
            answer.abandon()


class _Answer(Future[Any]):
    """The answer of an agent."""

    __slots__ = ("_agent", "_reply", "host", "port", "targets")

    def __init__(self, node: Node, host: str, service: str) -> None:
        super().__init__(node, f"the agent of the detached mesh ({service})")
        self.host = host
        self._agent = f"{host}/agent"
        self._reply: m.Reply | None = None
        self.targets = (node.peers.get(self._agent),)
        self.port = node.ports.open(self)
        for agent in self.targets:
            # It may have been lost before the port was open.
            if agent.dead is not None:
                self.lost(agent, agent.dead)

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """Take the answer."""
        self._reply = reply
        self._node.ports.close(self.port)
        self._complete()

    def abandon(self) -> None:
        """Expect no answer any more."""
        if not self.done:
            self._node.ports.close(self.port)

    def lost(self, peer: Any, dead: m.Dead) -> bool:
        """Fail if the agent has died."""
        if self.done or peer.proc != self._agent:
            return False
        self._node.ports.close(self.port)
        self._complete()
        return True

    def _make(self) -> Any:
        if self._reply is None:
            raise NoDetachedMeshError("the detached mesh ended before it was attached; start a new one")
        if self._reply.status == m.RESULT:
            return m.unpack(self._reply.body)
        failure = unpack_failure(self._reply.body)
        raise (DetachedMeshInUseError if failure.kind == DetachedMeshInUseError.__name__ else MonarchError)(
            failure.text
        )
