"""Services of a rank, for those who stop its code: where a call stands, and freeing it from what it waits in.

They run in the receiving thread, which also forms process groups: so a group that is made after a call has ended is not
taken for one that this call waits in.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from monarch._actors.functions import service
from monarch._actors.membership import membership, spoil
from monarch._actors.process import get_runtime
from monarch._core.fail_fast import Standing
from monarch._core.stop_ladder import Freed
from monarch._procs.blocked import Blocked, Wait, blocked

if TYPE_CHECKING:
    from monarch._actors.cells import Cell
    from monarch._wire.messages import Call

_DEPTH = 60
"""Frames that are looked through at most."""


def running(key: str, src: str, port: int) -> Cell | None:
    """The actor of this process that handles a call now; None if none does."""
    cell = get_runtime().actors.get(key)
    if cell is None:
        return None
    calls = [cell.running, *list(cell.turns.tasks.values())]
    return cell if any(call is not None and call.port == port and call.src == src for call in calls) else None


def waiting(key: str, src: str, port: int) -> Cell | None:
    """The actor of this process that has a call in its queue; None if none has."""
    cell = get_runtime().actors.get(key)
    queued = list(cell.queue) if cell is not None else []
    return cell if any(call.port == port and call.src == src for call in queued) else None


def ahead_of(key: str, src: str, port: int) -> Call | None:
    """The message that an actor of this process handles while one in its queue waits for its turn, if one does."""
    cell = waiting(key, src, port)
    return (cell.turns.call or cell.running) if cell is not None else None


def thread_of(cell: Cell) -> int:
    """The thread that the code of an actor runs in."""
    interrupts = cell.executor.interrupts
    return interrupts.ident if interrupts is not None else threading.main_thread().ident or 0


@service("quick")
def standing(key: str, src: str, port: int) -> Standing | None:
    """Where a call stands among the process groups of this rank; None if torch.distributed is not in use here.

    Args:
        key: of the actor's mesh.
        src: proc that has called.
        port: where it waits for the answer.
    """
    from monarch._actors.membership import uses_collectives

    world = membership().world
    if world is None and not uses_collectives():
        return Standing(get_runtime().rank, {})
    from monarch._tensors.world import counts

    cell = running(key, src, port)
    number = membership().round
    making = [] if world is None else [tuple(ranks) for ranks in list(world.making)]
    if cell is None:
        return Standing(get_runtime().rank, counts(), tuple(making), round=number)
    ident = thread_of(cell)
    frame = sys._current_frames().get(ident)
    if _makes_group(frame) and not making:
        making.append(())
    place = (id(frame), frame.f_lasti, frame.f_lineno) if frame is not None else ()
    return Standing(get_runtime().rank, counts(), tuple(making), place, blocked(ident).wait is Wait.SLEEP, number)


def _makes_group(frame: FrameType | None) -> bool:
    """Whether code is in a function of torch that makes a process group."""
    for _ in range(_DEPTH):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name in ("new_group", "init_process_group") and "distributed_c10d" in code.co_filename:
            return True
        frame = frame.f_back
    return False


@service("quick")
def expect(key: str, src: str, port: int, reason: str) -> None:
    """Others of a call are about to be freed, which may close the connections of this rank's collectives.

    Args:
        key: of the actor's mesh.
        src: proc that has called.
        port: where it waits for the answer.
        reason: for the error that its collectives raise.
    """
    if running(key, src, port) is not None:
        membership().free_call(src, port, reason)


@service("quick")
def free(key: str, src: str, port: int, reason: str) -> Freed:
    """Aborts what a call of this rank waits in: its collectives, a socket, a condition.

    The call goes on with an error, or with the interrupt that it has not taken yet.

    Args:
        key: of the actor's mesh.
        src: proc that has called.
        port: where it waits for the answer.
        reason: for the error that its collectives raise.

    Returns:
        What was aborted.
    """
    front = ahead_of(key, src, port)
    if front is not None and front.src == src:
        # What it waits for was interrupted in its place.
        port = front.port
    cell = running(key, src, port)
    if cell is None:
        return Freed.NOTHING
    ident = thread_of(cell)
    what = blocked(ident)
    if _makes_group(sys._current_frames().get(ident)):
        membership().free_call(src, port, reason)
        spoil(reason)
        _shut_waited(what)
        return Freed.COLLECTIVE
    # A thread that waits for something else, or sleeps, is in no collective; groups that work are kept.
    if _shut_waited(what):
        return Freed.CONNECTION
    if _wake(ident):
        return Freed.WAIT
    if what.wait is Wait.SLEEP:
        return Freed.NOTHING
    membership().free_call(src, port, reason)
    return Freed.COLLECTIVE if spoil(reason) else Freed.NOTHING


def _shut_waited(what: Blocked) -> int:
    """Ends the TCP connections that a thread waits for, such as one with torch's store."""
    if what.wait is not Wait.SOCKET or not what.files:
        return 0
    from monarch._tensors.connections import shut_down, tcp_sockets

    return shut_down({each for each in tcp_sockets() if each[0] in what.files})


def _wake(ident: int) -> int:
    """Wakes a thread that waits in a condition, so that it takes the interrupt that was raised in it.

    Python raises it between two steps of the thread's own code, of which a wait without a timeout makes none. A
    condition may wake at any time, so whoever waits looks again; the lock is one that only this waiter has.
    """
    frame = sys._current_frames().get(ident)
    if ident == threading.main_thread().ident or frame is None or frame.f_code is not threading.Condition.wait.__code__:
        return 0
    waiter = frame.f_locals.get("waiter")
    try:
        waiter.release()  # pyright: ignore[reportOptionalMemberAccess]
    except (AttributeError, RuntimeError):
        return 0
    return 1
