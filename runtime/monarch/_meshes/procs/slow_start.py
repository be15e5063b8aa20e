"""Tells the user why new processes have not started yet: one that would start them is suspended, or just slow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.procs.agents import agents_of
from monarch._node.node import Node
from monarch._procs.os.blocked import children_of, process_state
from monarch._wire.receiving.aside import tell

FIRST = float(os.environ.get("MONARCH_SLOW_START_SECONDS") or 4.0)
"""Seconds until the first look."""
_SLOW = 5
"""Looks after which a start without a known reason is told."""


def watch_start(node: Node, host: str, mesh: str, names: Sequence[str], bound: float) -> None:
    """Look now and then whether processes have started, and tell once why not.

    Args:
        node: of this process.
        host: where they start.
        mesh: name of their mesh.
        names: of the processes.
        bound: seconds after which the caller gives up.
    """
    node.receive_loop.call_later(FIRST, partial(_look, node, host, mesh, names, bound, 1))


def _look(node: Node, host: str, mesh: str, names: Sequence[str], bound: float, looks: int) -> None:
    """Runs in the receiving thread, so it only reads /proc."""
    late = [name for name in names if (peer := node.peers.known.get(name)) is not None and peer.starting]
    if not late or node.closed:
        return
    suspended = _suspended(node) if host == node.host else {}
    if suspended or looks >= _SLOW:
        where = describe_ranks(sorted(split_proc(name)[1] for name in late))
        reason = f" on host {host}"
        if suspended:
            pids = " ".join(str(pid) for pid in suspended)
            which = " and ".join(f"the {what} of this host (pid {pid})" for pid, what in suspended.items())
            one = len(suspended) == 1
            reason = (
                f": {which} {'is' if one else 'are'} suspended by a signal such as SIGSTOP; "
                f"kill -CONT {pids} resumes {'it' if one else 'them'}"
            )
        tell(
            f"monarch: {where} of {mesh} {'has' if len(late) == 1 else 'have'} not started after {FIRST * looks:g} s"
            f"{reason}. The start fails after {bound:g} s"
        )
        return
    node.receive_loop.call_later(FIRST, partial(_look, node, host, mesh, names, bound, looks + 1))


def _suspended(node: Node) -> dict[int, str]:
    """Return the suspended ones among this host's agent and its zygotes, by pid."""
    agent = agents_of(node).agent_pid
    if not agent:
        return {}
    found = {agent: "agent"} if process_state(agent) in ("T", "t") else {}
    zygotes = [pid for pid in children_of(agent) if process_state(pid) in ("T", "t") and _is_zygote(pid)]
    return found | dict.fromkeys(zygotes, "zygote")


def _is_zygote(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().startswith("monarch-zygote")
    except OSError:
        return False
