"""Groups that were closed by a Stop or a failure work again before the next call begins.

Code that reads torch's default group would get the next one by that. But a model in DDP or FSDP has kept its group, and
does not read it.
"""

from __future__ import annotations

import time
from contextlib import suppress

from monarch._actors.running import before, current
from monarch._groups.breaking import spoil_generation
from monarch._groups.convening import ensure_world
from monarch._groups.pipelined import ended
from monarch._groups.rendezvous import is_dead, local_rendezvous
from monarch._node.current import current_node
from monarch._node.services.asking import ask_proc
from monarch._wire.receiving.aside import tell
from monarch.config import FAILED_CALL_WAIT
from monarch.exceptions import CallTimeoutError, GroupError, MonarchError

_PATIENCE = 10.0
"""Seconds that a call waits for the other ranks before it begins without working groups."""
_ENDING_S = 2.0
"""Seconds that the next call of a rank waits for its caller to answer, and for a failed call to end on the other ranks,
which are freed meanwhile."""
_EVERY = 0.01
"""Seconds between questions to the caller."""
_awaited = -1
"""The port of the last failed call that a call has waited for. Written by threads of calls, in single operations."""
_tried = 0
"""The last broken generation that a call has tried to replace. Written by threads of calls, in single operations."""


def begin_renewing() -> None:
    """Renew broken groups before the next call from now on; in a rank, once."""
    local_rendezvous().on_broken = local_rendezvous().on_failed = _before_next_call


def _before_next_call() -> None:
    if _renew not in before:
        before.append(_renew)


def _renew() -> None:
    """Make the groups of this rank work again."""
    global _tried
    own, here, config = local_rendezvous(), current.get(), current_node().config
    if here is None or config is None or any(is_dead(config.procs.proc(rank)) for rank in range(config.procs.size)):
        # Once the mesh is healed.
        return
    with suppress(ValueError):
        before.remove(_renew)
    src, port = here[1].src, here[1].port
    if failed := own.calls.failed(src, port):
        number = _freed(failed, src, port)
        if number is None:
            before.append(_renew)
            return
        if number:
            spoil_generation("a call failed and its collective was aborted; the next use recreates the group", number)
            with suppress(ValueError):
                before.remove(_renew)
    if not own.lacks_default:
        return
    if own.broken:
        if own.generation == _tried:
            return
        _tried = own.generation
    try:
        ensure_world(_PATIENCE)
    except (GroupError, CallTimeoutError) as error:
        tell(f"monarch: process groups are unavailable until all ranks of the mesh can recreate them: {error}")


def _freed(failed: list[int], src: str, port: int) -> int | None:
    """Return the newest generation with ranks freed from failed calls; None if these have not ended on all ranks.

    The first call after a failure waits for that: the others are freed from their collectives right now. Later ones do
    not, since the failed call may run for long without any.
    """
    global _awaited
    bound = min(_ENDING_S, FAILED_CALL_WAIT())
    until = time.monotonic() + (bound if failed[-1] > _awaited else 0.0)
    _awaited = max(_awaited, failed[-1])
    while True:
        try:
            answer = ask_proc(src, ended, local_rendezvous().procs().uid, failed, port).get(bound)
        except MonarchError:
            return None
        if isinstance(answer, int):
            return answer
        if time.monotonic() >= until:
            return None
        time.sleep(_EVERY)
