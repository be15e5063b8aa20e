"""Who supervises the meshes of this process, and which verdicts are open: the one owner of both."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from monarch._core.events import Event
from monarch._core.verdicts import Hold, Verdicts
from monarch._node.future import Promise, judging
from monarch._wire.receiving.aside import tell_error
from monarch.exceptions import SupervisionError

if TYPE_CHECKING:
    from monarch._node.node import Node
    from monarch._supervision.mesh_failure import MeshFailure

TOGETHER = 0.05
"""Seconds for which failures are collected: those of one cause come together, and are told as one."""
VERDICT_S = 120.0
"""Seconds for which a call waits for a verdict."""


class Judge(Protocol):
    """Somebody who is asked about failures."""

    def covers(self, uid: str, key: str, rank: int) -> bool: ...
    def judge(self, failure: MeshFailure) -> bool: ...


class Oversight:
    """The supervisors of a process, and the verdicts that calls wait for.

    No lock of it is held while a supervisor runs, nor while what waits for a verdict is woken.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._verdicts: Verdicts[Promise[None]] = Verdicts(lambda: Promise(node, "a verdict"))
        self._lock = threading.RLock()
        self._supervisors: tuple[Judge, ...] = ()
        """Those whose ``with`` block runs, outermost first. Replaced as a whole under ``_lock``."""
        self.settled: Event[str] = Event(tell_error)
        """Told the uid of a mesh when its verdict has ended."""

    # Supervisors

    def enter(self, supervisor: Judge) -> None:
        """Asks a supervisor from now on, before those that are there."""
        with self._lock:
            self._supervisors = (*self._supervisors, supervisor)

    def leave(self, supervisor: Judge) -> None:
        """Asks a supervisor no more."""
        with self._lock:
            self._supervisors = tuple(each for each in self._supervisors if each is not supervisor)

    def asked_of(self, uid: str, key: str, rank: int) -> list[Judge]:
        """The supervisors that are asked about a failure, innermost first."""
        return [each for each in reversed(self._supervisors) if each.covers(uid, key, rank)]

    # Verdicts

    def hold(self, uid: str, holder: str) -> Hold[Promise[None]]:
        """Has calls that meet the dead of a mesh wait until the hold is released."""
        return self._verdicts.hold(uid, holder)

    def release(self, uid: str, hold: Hold[Promise[None]] | None) -> None:
        """Ends a hold, if there is one; the last one of a mesh ends its verdict."""
        ended = self._verdicts.release(hold) if hold is not None else None
        if ended is not None:
            ended.complete(_nothing)
            self.settled.tell(uid)

    def open_verdicts(self) -> dict[str, list[str]]:
        """Who decides about each mesh with an open verdict, in words, by uid."""
        return {uid: holders for uid in self._verdicts.meshes() if (holders := self._verdicts.holders(uid))}

    def is_open(self, uid: str) -> bool:
        """Whether the verdict on a mesh is open."""
        return self._verdicts.open(uid) is not None

    def decide(self, uid: str, holder: str, work: Callable[[], object]) -> None:
        """Does in a thread of its own what decides about a mesh; the verdict is open until that ends.

        Args:
            uid: of the mesh.
            holder: who decides, as errors say it.
            work: may wait, and run code of the user.
        """
        hold = self._verdicts.hold(uid, holder)

        def run() -> None:
            judging.set(True)
            try:
                work()
            except Exception:
                if not self._node.closed:
                    traceback.print_exc()
            finally:
                self.release(uid, hold)

        try:
            threading.Thread(target=run, name="monarch-judge", daemon=True).start()
        except BaseException:
            self.release(uid, hold)
            raise

    def wait(self, uid: str, name: str, what: str) -> bool:
        """Waits until no verdict on a mesh is open. Whoever decides about it does not wait for itself.

        Args:
            uid: of the mesh.
            name: of the mesh.
            what: what waits, as its error says it.

        Returns:
            Whether a verdict was open.

        Raises:
            SupervisionError: it was still open after 120 s.
        """
        if judging.get():
            return False
        verdict = self._verdicts.open(uid)
        waited = verdict is not None
        deadline = time.monotonic() + VERDICT_S
        while verdict is not None:
            if not self._node.wait(verdict, max(0.0, deadline - time.monotonic())):
                holders = "; ".join(dict.fromkeys(self._verdicts.holders(uid)))
                if holders:
                    raise SupervisionError(
                        f"{what} has waited {VERDICT_S:g} s for a verdict on {name}, which is still open: {holders}. "
                        f"The heal goes on; try again to wait for it, or use a slice of the ranks that live",
                        mesh=name,
                    )
            # Another rank may have died meanwhile.
            verdict = self._verdicts.open(uid)
        return waited


def _nothing() -> None:
    return None
