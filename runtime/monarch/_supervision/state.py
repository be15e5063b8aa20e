"""The supervisors of one process: who is asked about failures in its meshes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from monarch._node.node import Node

if TYPE_CHECKING:
    from monarch._supervision.mesh_failure import MeshFailure

TOGETHER = 0.05
"""Seconds for which failures are collected: those of one cause come together, and are told as one."""


class Judge(Protocol):
    """Somebody who is asked about failures."""

    def covers(self, uid: str, key: str, rank: int) -> bool: ...
    def judge(self, failure: MeshFailure) -> bool: ...


class Supervisors:
    """The part of a node that knows its supervisors. Any thread may use it."""

    def __init__(self, node: Node) -> None:
        self._lock = threading.RLock()
        self._supervisors: tuple[Judge, ...] = ()
        """Those whose ``with`` block runs, outermost first. Replaced as a whole under ``_lock``."""

    def enter(self, supervisor: Judge) -> None:
        """Ask a supervisor from now on, before those that are there."""
        with self._lock:
            self._supervisors = (*self._supervisors, supervisor)

    def leave(self, supervisor: Judge) -> None:
        """Ask a supervisor no more."""
        with self._lock:
            self._supervisors = tuple(each for each in self._supervisors if each is not supervisor)

    def asked_of(self, uid: str, key: str, rank: int) -> list[Judge]:
        """Return the supervisors that are asked about a failure, innermost first."""
        return [each for each in reversed(self._supervisors) if each.covers(uid, key, rank)]


def supervisors_of(node: Node) -> Supervisors:
    """Return the supervisors of a process."""
    return node.part(Supervisors)
