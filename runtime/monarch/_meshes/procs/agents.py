"""The interface of the session to meshes; its room is above this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from monarch._node.node import Node
from monarch._node.node_like import NodeLike
from monarch._node.peers.peer import Peer
from monarch._node.services.frame import send_to_all
from monarch._wire import messages as m
from monarch.config import STOP_REACT


class HostAgents(Protocol):
    """The services of the session that meshes use."""

    @property
    def agent_pid(self) -> int:
        """The pid of this host's agent; 0 if none runs."""
        ...

    def need_agent(self) -> None:
        """Start the agent of this host, unless it runs."""

    def base_env(self, host: str, /) -> dict[str, str | None]:
        """Return changes of this program's environment since the agent of a host was started."""
        ...

    def output_options(self, uid: str, stream: bool, window: float | None, /) -> None:
        """Set how the output of a process mesh is shown."""


class _NoAgents:
    """For a rank, whose agent runs as long as it does."""

    agent_pid = 0

    def need_agent(self) -> None:
        pass

    def base_env(self, host: str) -> dict[str, str | None]:
        return {}

    def output_options(self, uid: str, stream: bool, window: float | None) -> None:
        pass


class AgentsSlot:
    """The part of a node that starts agents."""

    def __init__(self, node: Node) -> None:
        self.agents: HostAgents = _NoAgents()
        """Set once, before anything is spawned."""


def agents_of(node: NodeLike) -> HostAgents:
    """Return the starter of agents of a process."""
    return node.part(AgentsSlot).agents


def stop_soon(node: Node, peers: Sequence[Peer], react: float | None = None) -> None:
    """Tell the agents of some processes that those are about to end, and to kill those that do not.

    Args:
        node: the node of the owner.
        peers: the processes.
        react: seconds of silence after which they are killed; None for the setting.
    """
    grace = STOP_REACT() if react is None else react
    by_host: dict[str, list[str]] = {}
    for peer in peers:
        by_host.setdefault(peer.host, []).append(peer.proc)
    if node.hosts.spreads.least:
        # The same message for all agents: each knows its own.
        agents = [node.peers.get(f"{host}/agent") for host in by_host]
        send_to_all(node, agents, m.encode(m.Stop(node.proc, [peer.proc for peer in peers], grace)))
        return
    for host, names in by_host.items():
        node.peers.to_agent(host, m.Stop(node.proc, names, grace))
