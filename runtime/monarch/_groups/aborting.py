"""Calls whose NCCL groups are aborted end there, instead of going on with what a broken collective has left.

A collective of NCCL is a kernel on the GPU. An abort ends it without a result, and nobody raises: ``backward()``
returns, and the optimizer would use gradients that were never reduced. A collective of gloo raises by itself.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from monarch._actors.interrupting import interrupt
from monarch._actors.interrupts import raised
from monarch._actors.running import before, current
from monarch._actors.table import actors_of
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node
from monarch.config import STEP_AT_ONCE

if TYPE_CHECKING:
    from monarch._tensors.collectives.world import World


def begin_ending_calls() -> None:
    """End the calls that use NCCL groups before these are aborted; in a rank, once."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    own = local_rendezvous()
    own.on_abort, own.on_formed = _end_calls, _note_calls
    register_optimizer_step_pre_hook(_before_step)


def _note_calls(world: World) -> None:
    """Note for each call from now on how many collectives had been begun before it, if these groups use NCCL."""
    if world.uses_nccl() and _note_call not in before:
        # First, since others may break the groups of earlier calls.
        before.insert(0, _note_call)


def _note_call() -> None:
    own, here = local_rendezvous(), current.get()
    if here is not None and own.world is not None:
        own.calls.begin(here[1].src, here[1].port, own.generation, _begun())


def _begun() -> int:
    from monarch._tensors.collectives.nccl import begun_by_all

    return begun_by_all()


def _end_calls(reason: str) -> None:
    """Interrupt the running calls that may have begun a collective; in any thread."""
    own, count = local_rendezvous(), _begun()
    for key, mailbox in list(actors_of(current_node()).here.items()):
        if key not in own.actors:
            continue
        threads = mailbox.executor.interrupts
        ident = threads.ident if threads is not None else threading.main_thread().ident
        for call in (mailbox.running, *list(mailbox.turns.tasks.values())):
            # One that has been interrupted cleans up.
            if call is None or ident in raised:
                continue
            # DDP has the groups of an earlier call, so use is not seen otherwise.
            if own.calls.has_begun(call.src, call.port, own.generation, count):
                own.calls.abort(call.src, call.port, reason)
                interrupt(key, call.src, call.port)


def _before_step(*_: Any) -> None:
    """Wait until this rank's GPU has reduced the gradients, so that an abort finds the call before the step is issued.

    The kernels of a step that is issued earlier run after a collective that was aborted. A step that is captured in a
    CUDA graph runs later, and cannot wait.
    """
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized() or STEP_AT_ONCE():
        return
    world = local_rendezvous().world
    if world is None or world.place.size < 2 or not world.uses_nccl():
        return
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()
