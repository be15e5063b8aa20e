"""The end of processes with their program or their hosts: they clean up, and have a deadline."""

from __future__ import annotations

import sys
import time
from collections.abc import Container

from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.procs.state import DeathFuture
from monarch._meshes.procs.stopping import begin_stop
from monarch._meshes.registry import meshes_of
from monarch._node.node import Node
from monarch.config import STOP_CLEANUP
from monarch.exceptions import CallTimeoutError

_DRAIN_S = 0.5
"""Seconds for calls that run, before they are interrupted."""
_REACT_S = 1.0
"""Seconds of silence after which a process is killed."""


def end_processes(node: Node, seconds: float, hosts: Container[str], reason: str) -> None:
    """Stop the meshes on some hosts and wait until their processes have ended; those that are late are killed later.

    Args:
        node: the node of the program.
        seconds: the longest wait.
        hosts: ids of the hosts; meshes that have processes elsewhere are left alone.
        reason: for later callers.
    """
    until = time.monotonic() + seconds
    ends: list[tuple[str, DeathFuture]] = []
    for state in list(meshes_of(node).own_procs.values()):
        if all(host in hosts for host in state.procs.hosts):
            ended = begin_stop(node, state, reason, _REACT_S, _DRAIN_S)
            if isinstance(ended, DeathFuture):
                ends.append((state.procs.name, ended))
    for name, ended in ends:
        try:
            ended.get(max(0.0, until - time.monotonic()))
        except CallTimeoutError:
            late = sorted(split_proc(peer.proc)[1] for peer in ended.targets if peer.dead is None)
            if late:
                print(
                    f"{describe_ranks(late)} of {name} did not end within {seconds:g} s and "
                    f"{'was' if len(late) == 1 else 'were'} killed; raise {STOP_CLEANUP.variable} to give __cleanup__ "
                    f"and exit functions more time",
                    file=sys.stderr,
                )
