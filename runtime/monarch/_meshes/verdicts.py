"""Open verdicts: meshes with an undecided failure, and the calls that wait for the decision."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from monarch._core.events import Event
from monarch._core.verdicts import Hold, Verdicts
from monarch._node.future import Promise, judging
from monarch._node.node import Node
from monarch._python.threads import spawn_thread
from monarch._wire.receiving.aside import tell_error
from monarch.exceptions import SupervisionError

VERDICT_S = 120.0
"""Seconds that a call waits for a verdict."""


class OpenVerdicts:
    """The part of a node with its open verdicts. Any thread may use it.

    Its lock is not held while a supervisor runs or while waiters are woken.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._verdicts: Verdicts[Promise[None]] = Verdicts(lambda: Promise(node, "a verdict"))
        self.settled: Event[[str]] = Event(tell_error)
        """Fires with the uid of a mesh when its verdict is settled."""

    def hold(self, uid: str, holder: str) -> Hold[Promise[None]]:
        """Make calls to dead ranks of a mesh wait until the hold is released."""
        return self._verdicts.hold(uid, holder)

    def release(self, uid: str, hold: Hold[Promise[None]] | None) -> None:
        """Release a hold, if any; the last one of a mesh settles its verdict."""
        ended = self._verdicts.release(hold) if hold is not None else None
        if ended is not None:
            ended.complete(_nothing)
            self.settled.tell(uid)

    def open_verdicts(self) -> dict[str, list[str]]:
        """Return descriptions of the holders of each open verdict, by uid."""
        return {uid: holders for uid in self._verdicts.meshes() if (holders := self._verdicts.holders(uid))}

    def is_open(self, uid: str) -> bool:
        """Return whether the verdict on a mesh is open."""
        return self._verdicts.open(uid) is not None

    def decide(self, uid: str, holder: str, work: Callable[[], object]) -> None:
        """Run a decision about a mesh in its own thread; the verdict is open until it ends.

        Args:
            uid: the uid of the mesh.
            holder: the decider, for errors.
            work: the decision; may wait and run user code.
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
            spawn_thread("monarch-judge", run)
        except BaseException:
            self.release(uid, hold)
            raise

    def wait(self, uid: str, name: str, what: str) -> bool:
        """Wait until no verdict on a mesh is open. The deciding thread does not wait for itself.

        Args:
            uid: the uid of the mesh.
            name: the name of the mesh.
            what: the waiting call, for errors.

        Returns:
            Whether a verdict was open.

        Raises:
            SupervisionError: the verdict was still open after 120 s.
        """
        if judging.get():
            return False
        verdict = self._verdicts.open(uid)
        waited = verdict is not None
        deadline = time.monotonic() + VERDICT_S
        while verdict is not None:
            if not self._node.waits.wait(verdict, max(0.0, deadline - time.monotonic())):
                holders = "; ".join(dict.fromkeys(self._verdicts.holders(uid)))
                if holders:
                    raise SupervisionError(
                        f"{what} has waited {VERDICT_S:g} s because a failure of {name} is still being handled: "
                        f"{holders}. The heal continues; retry to wait for it, or use a slice of the live ranks",
                        mesh=name,
                    )
            # Another rank may have died meanwhile.
            verdict = self._verdicts.open(uid)
        return waited


def verdicts_of(node: Node) -> OpenVerdicts:
    """Return the open verdicts of a process."""
    return node.part(OpenVerdicts)


def _nothing() -> None:
    return None
