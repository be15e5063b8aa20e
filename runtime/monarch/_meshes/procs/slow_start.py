"""Tells the user why new processes have not started yet: one that would start them is suspended, or just slow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.procs.agents import agents_of
from monarch._node.node import Node
from monarch._node.services.asking import ServiceAnswers
from monarch._procs.agent.services import suspended
from monarch._procs.os.blocked import process_state
from monarch._procs.os.children import suspended_zygotes
from monarch._wire.receiving.aside import tell

FIRST = float(os.environ.get("MONARCH_SLOW_START_SECONDS") or 4.0)
"""Seconds until the first look."""
_SLOW = 5
"""Looks after which a start without a known reason is told."""


def watch_start(node: Node, host: str, mesh: str, names: Sequence[str], bound: float) -> None:
    """Check now and then whether processes have started, and report once why not.

    Args:
        node: the node of this process.
        host: where they start.
        mesh: name of their mesh.
        names: the names of the processes.
        bound: seconds after which the caller gives up.
    """
    start = _Start(node, host, mesh, names, bound)
    node.receive_loop.call_later(FIRST, start.look)


class _Start:
    """A start that is watched; see ``watch_start``. Receiving thread only, so it waits for nothing."""

    def __init__(self, node: Node, host: str, mesh: str, names: Sequence[str], bound: float) -> None:
        self._node = node
        self._host = host
        self._mesh = mesh
        self._names = names
        self._bound = bound
        self._looks = 0
        self._asked: ServiceAnswers | None = None
        """The question to the agent of another host, until it is answered."""

    def look(self) -> None:
        """Find the reason, or look again later."""
        if self._asked is not None:
            self._asked.close()
        if self._node.closed or not self._late():
            return
        self._looks += 1
        if self._host == self._node.host:
            found = _suspended_here(self._node)
            if found:
                self._tell(_of_suspended(found, "this host", "kill"))
                return
        elif self._asked is not None:
            self._tell(
                f": the agent of host {self._host} has not answered for {FIRST:g} s; it is suspended, or the host is "
                f"down or unreachable"
            )
            return
        else:
            self._asked = ServiceAnswers(self._node, [f"{self._host}/agent"], suspended(), self._hear)
        if self._looks >= _SLOW:
            self._tell(f" on host {self._host}")
            return
        self._node.receive_loop.call_later(FIRST, self.look)

    def _hear(self, _: str, answer: Any) -> None:
        """Take the answer of the agent of another host."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None
        if answer and isinstance(answer, list) and self._late():
            found = dict.fromkeys(cast("list[int]", answer), "zygote")
            self._tell(_of_suspended(found, f"host {self._host}", "on that host, kill"))
            self._names = ()

    def _late(self) -> list[str]:
        known = self._node.peers.known
        return [name for name in self._names if (peer := known.get(name)) is not None and peer.starting]

    def _tell(self, reason: str) -> None:
        late = self._late()
        if self._asked is not None:
            self._asked.close()
        where = describe_ranks(sorted(split_proc(name)[1] for name in late))
        tell(
            f"monarch: {where} of {self._mesh} {'has' if len(late) == 1 else 'have'} not started after "
            f"{FIRST * self._looks:g} s{reason}. Startup fails after {self._bound:g} s"
        )


def _of_suspended(found: Mapping[int, str], host: str, kill: str) -> str:
    """Return the end of a sentence that names suspended processes.

    Args:
        found: by pid.
        host: where they are.
        kill: the command that resumes them, without arguments.
    """
    pids = " ".join(str(pid) for pid in found)
    which = " and ".join(f"the {name} of {host} (pid {pid})" for pid, name in found.items())
    one = len(found) == 1
    return (
        f": {which} {'is' if one else 'are'} suspended by a signal such as SIGSTOP; "
        f"{kill} -CONT {pids} resumes {'it' if one else 'them'}"
    )


def _suspended_here(node: Node) -> dict[int, str]:
    """Return the suspended ones among this host's agent and its zygotes, by pid."""
    agent = agents_of(node).agent_pid
    if not agent:
        return {}
    found = {agent: "agent"} if process_state(agent) in ("T", "t") else {}
    return found | dict.fromkeys(suspended_zygotes(agent), "zygote")
