"""Escalation of a failure: to the supervisors of the mesh, to its owner, and finally to the program."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from monarch._actors.supervising import supervise, supervises
from monarch._actors.table import actors_of
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.verdicts import Tally
from monarch._meshes.verdicts import verdicts_of
from monarch._node.node import Node
from monarch._node.remote_errors import pack_failure
from monarch._python.threads import spawn_thread
from monarch._supervision.mesh_failure import MeshFailure
from monarch._supervision.state import FailureHandler, supervisors_of
from monarch._wire import messages as m
from monarch.exceptions import SupervisionError


def default_fault_hook(failure: MeshFailure) -> None:
    """Print the failure on stderr; later calls to the mesh raise."""
    # The program may have closed its stderr.
    with contextlib.suppress(OSError, ValueError):
        # In one write, since several meshes may fail at once.
        print(f"{describe_unhandled(failure)}\n", end="", file=sys.stderr, flush=True)


def describe_unhandled(failure: MeshFailure) -> str:
    """Return the text for an unhandled failure."""
    at = time.strftime("%H:%M:%S", time.localtime(failure.when)) if failure.when else ""
    return f"monarch: {f'{at} ' if at else ''}unhandled failure of {failure.report()}"


class Escalation:
    """Escalates failures of one process's meshes. It has no state and holds no lock."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def judge(
        self,
        made: Callable[[tuple[int, ...]], MeshFailure],
        uid: str,
        actor: str,
        ranks: tuple[int, ...],
        owner: str,
        latest: int,
    ) -> None:
        """Ask the supervisors about failed ranks, and report those that nobody handles.

        Args:
            made: makes the failure for some of the ranks.
            uid: the uid of the process mesh; empty if unknown here.
            actor: key of the failed actors; empty for processes.
            ranks: base ranks.
            owner: key of the actor that owns the mesh, or empty.
            latest: the last port opened before the failure: later calls are unaffected.
        """
        supervisors = supervisors_of(self._node)
        asked = {rank: supervisors.asked_of(uid, actor, rank) for rank in ranks}
        tally = Tally(ranks)

        def judged(rank: int, handled: bool) -> None:
            left = tally.judged(rank, handled)
            if left:
                self._unhandled(made(left), uid, actor, owner, latest)

        def ask() -> None:
            for rank, judges in asked.items():
                self.ask(made((rank,)), judges, owner, lambda handled, rank=rank: judged(rank, handled))

        if any(asked.values()):
            verdicts_of(self._node).decide(
                uid, f"its supervisors are handling the failure of {describe_ranks(ranks)}", ask
            )
        else:
            ask()

    def _unhandled(self, failure: MeshFailure, uid: str, actor: str, owner: str, latest: int) -> None:
        head = failure.report().partition("\n")[0]
        if not uid or not self._node.ports.fail_calls(uid, actor, f"{head}; no supervisor handled it", latest):
            self.up(failure, owner)

    def ask(
        self, failure: MeshFailure, supervisors: Sequence[FailureHandler], owner: str, judged: Callable[[bool], None]
    ) -> None:
        """Ask the supervisors, then the owner, to handle a failure; in a thread that may wait."""
        for supervisor in supervisors:
            if supervisor.judge(failure):
                judged(True)
                return
        mailbox = actors_of(self._node).here.get(owner) if owner else None
        if mailbox is not None and supervises(mailbox):
            supervise(mailbox, failure, judged)
        else:
            judged(False)

    def up(self, failure: MeshFailure, owner: str) -> None:
        """Fail the owner of an unhandled failure as well; in a program, call its hook."""
        node = self._node
        mailbox = actors_of(node).here.get(owner) if owner else None
        if mailbox is not None:
            mailbox.fail(_pack(failure))
        elif node.config is None:
            # In another thread, since the hook may do anything and this one receives messages.
            spawn_thread("monarch-fault-hook", call_hook, failure)
        else:
            # Its owner is gone or was not an actor: the owner of this process is next.
            fault = m.Fault(node.proc, node.config.procs.uid, node.rank, _pack(failure))
            node.peers.get(node.config.owner).send(m.encode(fault))


def call_hook(failure: MeshFailure) -> None:
    """Call the program's hook, which may be user code."""
    module = sys.modules.get("monarch.actor")
    hook = getattr(module, "unhandled_fault_hook", None) or default_fault_hook
    try:
        hook(failure)
    except SystemExit as end:
        end_program(end)


def end_program(end: SystemExit) -> None:
    """Interrupt the main thread, for a handler of failures that calls ``sys.exit``, which ends its own thread only.

    A program that ignores SIGINT, as one that a script has started in the background, gets SIGTERM.
    """
    if end.code and not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
    ignored = not callable(signal.getsignal(signal.SIGINT))
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM if ignored else signal.SIGINT)


def _pack(failure: MeshFailure) -> bytes:
    error = SupervisionError(failure.report(), mesh=failure.mesh_name, ranks=failure.ranks)
    return pack_failure(error, True)
