"""Calls whose NCCL groups are aborted end there, instead of going on with what a broken collective has left.

A collective of NCCL is a kernel on the GPU. An abort ends it without a result, and nobody raises: ``backward()``
returns, and the optimizer would use gradients that were never reduced. A collective of gloo raises by itself.
"""

from __future__ import annotations

import threading

from monarch._actors.interrupting import interrupt
from monarch._actors.interrupts import raised
from monarch._actors.table import actors_of
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node


def begin_ending_calls() -> None:
    """End the calls that use NCCL groups before these are aborted; in a rank, once."""
    local_rendezvous().on_abort = _end_calls


def _end_calls(reason: str) -> None:
    """Interrupt the running calls that use the groups of this generation; in the receiving thread."""
    own = local_rendezvous()
    for key, mailbox in list(actors_of(current_node()).here.items()):
        threads = mailbox.executor.interrupts
        ident = threads.ident if threads is not None else threading.main_thread().ident
        for call in (mailbox.running, *list(mailbox.turns.tasks.values())):
            # One that has been interrupted cleans up.
            if call is not None and ident not in raised and own.calls.used(call.src, call.port, -1) == own.generation:
                own.calls.abort(call.src, call.port, reason)
                interrupt(key, call.src, call.port)
