"""What meshes need of the session, whose room is above this one."""

from __future__ import annotations

from typing import Protocol

from monarch._node.node import Node
from monarch._node.node_like import NodeLike


class HostAgents(Protocol):
    """What meshes need of the session; its room is above this one."""

    @property
    def agent_pid(self) -> int:
        """Of the agent of this host; 0 if none runs."""
        ...

    def need_agent(self) -> None:
        """Start the agent of this host, unless it runs."""

    def base_env(self, host: str, /) -> dict[str, str | None]:
        """Return how the environment of this program has changed since the agent of a host was started."""
        ...

    def output_options(self, uid: str, stream: bool, window: float | None, /) -> None:
        """Set how the output of a mesh of procs is shown."""


class _NoAgents:
    """Of a rank: its agent runs as long as it does."""

    agent_pid = 0

    def need_agent(self) -> None:
        pass

    def base_env(self, host: str) -> dict[str, str | None]:
        return {}

    def output_options(self, uid: str, stream: bool, window: float | None) -> None:
        pass


class AgentsSlot:
    """The part of a node that says who starts agents."""

    def __init__(self, node: Node) -> None:
        self.agents: HostAgents = _NoAgents()
        """Set once, before anything is spawned."""


def agents_of(node: NodeLike) -> HostAgents:
    """Return what starts the agents of a process."""
    return node.part(AgentsSlot).agents
