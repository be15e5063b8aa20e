"""Meshes in tests: results in rank order, and ranks that a test kills."""

from __future__ import annotations

import os
import signal
from typing import Any

from leaks import wait_until
from monarch.exceptions import DeviceMeshError


def values(future: Any, timeout: float = 60) -> list[Any]:
    """Return the values of a call, in rank order."""
    return list(future.get(timeout).values())


def known_dead(mesh: Any, rank: int) -> bool:
    """Return whether the program knows that a rank is dead."""
    return mesh._node.peers.get(mesh._state.procs.proc(rank)).dead is not None


def kill(mesh: Any, *ranks: int) -> list[int]:
    """Kill some ranks, wait until the program knows, and return the pids of all.

    Args:
        mesh: actors whose endpoint ``who`` returns the rank and the pid.
        ranks: to kill.
    """
    pids = [pid for _, pid in values(mesh.who.call())]
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)

    def known() -> bool:
        try:
            mesh.who.call().get(10)
        except DeviceMeshError as error:
            return set(error.ranks) == set(ranks)
        return False

    assert wait_until(known)
    return pids
