"""The supervisors of one process, which are asked about failures in its meshes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from monarch._node.node import Node

if TYPE_CHECKING:
    from monarch._supervision.mesh_failure import MeshFailure

TOGETHER = 0.05
"""Seconds to collect failures, so that those of one cause are reported together."""


class FailureHandler(Protocol):
    """A handler of failures."""

    def covers(self, uid: str, key: str, rank: int) -> bool: ...
    def judge(self, failure: MeshFailure) -> bool: ...


class Supervisors:
    """The part of a node with its supervisors. Any thread may use it."""

    def __init__(self, node: Node) -> None:
        self._lock = threading.RLock()
        self._supervisors: tuple[FailureHandler, ...] = ()
        """Supervisors in their ``with`` block, outermost first. Replaced as a whole under ``_lock``."""

    def enter(self, supervisor: FailureHandler) -> None:
        """Add a supervisor, to be asked before the others."""
        with self._lock:
            self._supervisors = (*self._supervisors, supervisor)

    def leave(self, supervisor: FailureHandler) -> None:
        """Remove a supervisor."""
        with self._lock:
            self._supervisors = tuple(each for each in self._supervisors if each is not supervisor)

    def asked_of(self, uid: str, key: str, rank: int) -> list[FailureHandler]:
        """Return the supervisors of a failure, innermost first."""
        return [each for each in reversed(self._supervisors) if each.covers(uid, key, rank)]


def supervisors_of(node: Node) -> Supervisors:
    """Return the supervisors of a process."""
    return node.part(Supervisors)
