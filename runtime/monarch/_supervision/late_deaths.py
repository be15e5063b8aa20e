"""Deaths that this process has not heard of yet: a heal asks the host agents first."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

from monarch._node.node_like import NodeLike
from monarch._node.services.asking import ServiceAnswers
from monarch._procs.agent.services import ended
from monarch._procs.session_folder import host_of

_PATIENCE = 2.0
"""Seconds to wait for the agents; an agent that is stopped does not hold up a heal for longer."""


def await_deaths(node: NodeLike, procs: Sequence[str]) -> None:
    """Wait until this process knows the deaths of all processes that have ended.

    An agent reports a death before it answers a later request, but the answer may come by way of another host and
    overtake that. So the agents name all processes that have ended.
    """
    until = time.monotonic() + _PATIENCE
    hosts = {host_of(proc) for proc in procs if node.peers.get(proc).dead is None}
    agents = [agent for host in sorted(hosts) if node.peers.get(agent := f"{host}/agent").dead is None]
    while agents and time.monotonic() < until:
        agents = _with_ended(node, agents, procs, until)


def _with_ended(node: NodeLike, agents: list[str], procs: Sequence[str], until: float) -> list[str]:
    """Ask agents and return those whose reports of deaths have not all arrived."""
    # Written in the receiving thread, in atomic steps, until the answers are closed.
    left, behind, all_answered = set(agents), list[str](), threading.Event()

    def heard(agent: str, answer: Any) -> None:
        left.discard(agent)
        # Anything else is an error of the agent.
        names = cast("list[str]", answer) if isinstance(answer, list) else []
        if any(node.peers.get(proc).dead is None for proc in names):
            behind.append(agent)
        if not left:
            all_answered.set()

    answers = ServiceAnswers(node, agents, ended(sorted(procs)), heard)
    try:
        all_answered.wait(max(0.0, until - time.monotonic()))
    finally:
        answers.close()
    return behind
