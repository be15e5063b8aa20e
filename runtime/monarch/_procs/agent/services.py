"""The services of a host agent: requests by name, with plain values as arguments and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch._wire import messages as m

STATES = "agent.states"
ENDED = "agent.ended"
GPUS = "agent.gpus"
SUSPENDED = "agent.suspended"
CLAIM = "agent.claim"
LISTEN = "agent.listen"
NOTE = "agent.note"
DESCRIBE = "agent.describe"


class AgentRequest(NamedTuple):
    """A service of an agent with its argument."""

    name: str
    argument: Any

    def frame(self, proc: str, port: int) -> bytes:
        """Return the request message.

        Args:
            proc: the sender.
            port: waits for the answer; 0 for none.
        """
        return m.encode(m.Ask(proc, port, b"", self.name, m.pack(self.argument)))


def states(procs: Sequence[str] = ()) -> AgentRequest:
    """Ask for the state of processes: by proc id, the letter in /proc, the pid, and seconds with and without a CPU."""
    return AgentRequest(STATES, list(procs))


def ended(procs: Sequence[str]) -> AgentRequest:
    """Ask which of some processes have ended, those included whose deaths the agent has reported."""
    return AgentRequest(ENDED, list(procs))


def suspended() -> AgentRequest:
    """Ask for the pids of suspended zygotes."""
    return AgentRequest(SUSPENDED, None)


def shared_gpus(uid: str) -> AgentRequest:
    """Ask which GPUs of a host the mesh with this uid shares: a dict from each GPU to the names of the meshes of its
    ranks, this mesh first."""
    return AgentRequest(GPUS, uid)


def claim(pid: int, others: Sequence[str]) -> AgentRequest:
    """Ask a host of a detached mesh to make the asking process, of that pid, its controller; returns a dict of what
    runs there. The mesh has other hosts with these ids."""
    return AgentRequest(CLAIM, [pid, list(others)])


def listen() -> AgentRequest:
    """Tell a detached mesh that its controller is ready for the kept output."""
    return AgentRequest(LISTEN, None)


def note(notes: bytes) -> AgentRequest:
    """Leave bytes with a detached mesh, for the next controller."""
    return AgentRequest(NOTE, notes)


def describe_procs(uid: str, description: bytes) -> AgentRequest:
    """Leave with a detached mesh how one of its meshes of procs is started, for the next controller."""
    return AgentRequest(DESCRIBE, [uid, description])
