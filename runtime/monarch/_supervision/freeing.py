"""Services of a rank for stopping its code: where a call stands, and freeing it from its waits.

They run in the receiving thread, which also forms process groups: so a group made after a call has ended is not
mistaken for one that this call waits in.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from monarch._actors.cleanup import cleans_up
from monarch._actors.pausing.gate import gate
from monarch._actors.table import actors_of
from monarch._core.fail_fast import CallState
from monarch._core.stop_ladder import Freed
from monarch._groups.breaking import spoil_generation
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node
from monarch._node.future import Future
from monarch._node.services.registry import service
from monarch._procs.os.blocked import Blocked, WaitKind, blocked
from monarch._procs.rank.foreground import end_shell
from monarch._python.frames import frame_of, is_between_calls

if TYPE_CHECKING:
    from monarch._actors.mailbox import Mailbox
    from monarch._wire.messages import Call

_GET: CodeType = Future[Any].get.__code__

_DEPTH = 60
"""The most frames to search."""
_WAIT_DEPTH = 20
"""The most frames between code that waits for an answer and its thread's current frame."""


def _is(call: Call | None, src: str, port: int) -> bool:
    return call is not None and call.port == port and src in ("", call.src)


def running(key: str, src: str, port: int) -> tuple[Mailbox, Call] | None:
    """Return the actor of this process that is handling a call, and the call; None if none is.

    Args:
        key: the key of the actor's mesh.
        src: the calling proc; empty for any.
        port: the port at which the caller waits; 0 for a broadcast.
    """
    mailbox = actors_of(current_node()).here.get(key)
    calls = [mailbox.running, *list(mailbox.turns.tasks.values())] if mailbox is not None else []
    return next(
        ((mailbox, call) for call in calls if call is not None and _is(call, src, port) and mailbox is not None), None
    )


def waiting(key: str, src: str, port: int) -> Mailbox | None:
    """Return the actor of this process with a call in its queue, or None."""
    mailbox = actors_of(current_node()).here.get(key)
    queued = list(mailbox.queue) if mailbox is not None else []
    return mailbox if any(_is(call, src, port) for call in queued) else None


def _is_idle(key: str, src: str, port: int) -> bool:
    """Return whether a call neither runs nor waits here; a constructor's waits until the actor exists."""
    mailbox = actors_of(current_node()).here.get(key)
    return mailbox is None or (not mailbox.is_coming and waiting(key, src, port) is None)


def _is_busy(mailbox: Mailbox) -> bool:
    return bool(mailbox.running or mailbox.queue or mailbox.turns.tasks or mailbox.is_coming)


def thread_of(mailbox: Mailbox) -> int:
    """Return the thread that runs an actor's code."""
    interrupts = mailbox.executor.interrupts
    return interrupts.ident if interrupts is not None else threading.main_thread().ident or 0


@service("freeing.standing", "quick")
def standing(key: str, src: str, port: int) -> CallState:
    """Return where a call stands among this rank's process groups.

    Args:
        key: the key of the actor's mesh.
        src: the calling proc.
        port: the port at which the caller waits.
    """
    from monarch._groups.rendezvous import uses_collectives

    node, world = current_node(), local_rendezvous().world
    found = running(key, src, port)
    number = local_rendezvous().generation
    busy = any(_is_busy(each) for each in list(actors_of(node).here.values()))
    idle = found is None and _is_idle(key, src, port)
    gate = _gate(src)
    groups: dict[str, tuple[tuple[int, ...], int]] = {}
    if world is not None or uses_collectives():
        from monarch._tensors.collectives.world import counts

        groups = counts()
    making = [] if world is None else [(name, ranks) for name, (ranks, _) in list(world.making.items())]
    made = () if world is None else tuple(world.made.copy())
    if found is None:
        return CallState(node.rank, groups, tuple(making), (), False, number, idle, busy, made, gate)
    ident = thread_of(found[0])
    frame = frame_of(ident)
    if _makes_group(frame) and not making:
        making.append(("", ()))
    wait = blocked(ident).wait
    groups |= _being_checked(ident, frame, node.rank, wait)
    place, sleeps = place_of(frame), wait is WaitKind.SLEEP and not _is_checking(ident)
    return CallState(node.rank, groups, tuple(making), place, sleeps, number, idle, busy, made, gate)


def _gate(src: str) -> int:
    """Port of a call of a process that waits here for the end of older ones, if nothing else runs here; else 0."""
    cells = list(actors_of(current_node()).here.values())
    running = [call for cell in cells for call in (cell.running, *list(cell.turns.tasks.values())) if call is not None]
    alone = len(running) == 1 and not any(cell.is_coming for cell in cells)
    return local_rendezvous().calls.gates.get(src, 0) if alone else 0


def _being_checked(
    ident: int, frame: FrameType | None, rank: int, wait: WaitKind
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the group whose collective a thread is checking, if checks run before collectives are counted."""
    if not _is_checking(ident):
        return {}
    waits = sys.modules["monarch._tensors.collectives.waiting"].waits_in(frame, rank, (), wait is WaitKind.OTHER)
    return {waits.group: (waits.members, waits.number)} if waits is not None and not waits.peers else {}


def place_of(frame: FrameType | None) -> tuple[int, ...]:
    """Return where a thread's code is: equal while it does not move. A wait for an answer is one place."""
    at = _caller_of_wait(frame) or _outside_check(_outside_receive(frame))
    return (id(at), at.f_lasti, at.f_lineno) if at is not None else ()


def _outside_check(frame: FrameType | None) -> FrameType | None:
    """Return the frame outside a wait for other ranks to call the same collective, which looks for them in turns."""
    agreeing = sys.modules.get("monarch._tensors.collectives.agreeing")
    if agreeing is not None and frame is not None:
        for each in (frame, frame.f_back):
            if each is not None and each.f_code is agreeing.WAITS:
                return each.f_back
    return frame


def _outside_receive(frame: FrameType | None) -> FrameType | None:
    """Return the frame outside a wait for a message from any rank, which continues in steps."""
    waiting = sys.modules.get("monarch._tensors.collectives.waiting")
    return waiting.outside_receive(frame) if waiting is not None and frame is not None else frame


def _caller_of_wait(frame: FrameType | None) -> FrameType | None:
    """Return the frame that waits for an answer; its thread receives meanwhile and so keeps moving."""
    for _ in range(_WAIT_DEPTH):
        if frame is None:
            return None
        if frame.f_code is _GET:
            return frame.f_back
        frame = frame.f_back
    return None


def _makes_group(frame: FrameType | None) -> bool:
    """Return whether a frame is in a torch function that makes a process group."""
    for _ in range(_DEPTH):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name in ("new_group", "init_process_group") and "distributed_c10d" in code.co_filename:
            return True
        frame = frame.f_back
    return False


@service("freeing.expect", "quick")
def expect(key: str, src: str, port: int, reason: str, number: int) -> None:
    """Prepare for the freeing of other ranks, which may close connections of this rank's collectives.

    Args:
        key: the key of the actor's mesh.
        src: the calling proc.
        port: the port at which the caller waits.
        reason: for the error of its collectives.
        number: the newest generation of groups of the others; a newer one works.
    """
    if local_rendezvous().generation <= number and running(key, src, port) is not None:
        _explain(reason)


@service("freeing.free", "quick")
def free(key: str, src: str, port: int, reason: str, number: int, spare: bool = False) -> Freed:
    """Abort the waits of a call of this rank: collectives, a socket, a condition.

    The call continues with an error or with its pending interrupt.

    Args:
        key: the key of the actor's mesh.
        src: the calling proc.
        port: the port at which the caller waits.
        reason: for the error of its collectives.
        number: the generation of groups at the time of the request; newer groups are left alone.
        spare: whether to leave a call alone that cleans up after its interrupt.

    Returns:
        A description of the aborted waits.
    """
    found = running(key, src, port)
    if found is None:
        return Freed.NOTHING
    ident = thread_of(found[0])
    if spare and cleans_up(ident):
        return Freed.NOTHING
    # C code of the call may wait for another thread of it that is at a breakpoint, as a backward pass does.
    gate.resume_beside(ident)
    if ident == threading.main_thread().ident and end_shell():
        return Freed.NOTHING
    frame, what = frame_of(ident), blocked(ident)
    if _makes_group(frame):
        _explain(reason)
        spoil_generation(reason, number)
        _shut_waited(what)
        return Freed.COLLECTIVE
    if _has_checked(ident):
        return Freed.NOTHING
    if _is_checking(ident):
        _explain(reason)
        spoil_generation(reason, number)
        return Freed.COLLECTIVE
    # A thread in another wait, or asleep, is not in a collective; keep working groups.
    if _shut_waited(what):
        return Freed.CONNECTION
    if _wake(ident):
        return Freed.WAIT
    if what.wait is WaitKind.SLEEP or local_rendezvous().generation > number:
        return Freed.NOTHING
    if frame is not None and is_between_calls(frame):
        # It has not taken its interrupt yet, and others may be in a collective of its groups.
        return Freed.NOTHING
    _explain(reason)
    return Freed.COLLECTIVE if spoil_generation(reason, number) else Freed.NOTHING


def _is_checking(ident: int) -> bool:
    """Return whether a thread compares its collective with those of other ranks."""
    # The receiving thread must not import anything.
    agreeing = sys.modules.get("monarch._tensors.collectives.agreeing")
    return agreeing is not None and agreeing.waits_for_ranks(ident)


def _has_checked(ident: int) -> bool:
    """Return whether a thread has compared its collective, and is about to begin it or to raise."""
    agreeing = sys.modules.get("monarch._tensors.collectives.agreeing")
    return agreeing is not None and agreeing.has_read(ident)


def _explain(reason: str) -> None:
    """Tell calls in a collective here why it broke."""
    for mailbox in list(actors_of(current_node()).here.values()):
        for call in (mailbox.running, *list(mailbox.turns.tasks.values())):
            if call is not None:
                local_rendezvous().calls.free(call.src, call.port, reason)


def _shut_waited(what: Blocked) -> int:
    """Shut the TCP connections that a thread waits for, such as to torch's store."""
    if what.wait is not WaitKind.SOCKET or not what.files:
        return 0
    from monarch._tensors.collectives.connections import open_sockets, shut_down

    return shut_down({each for each in open_sockets() if each[0] in what.files})


def _wake(ident: int) -> int:
    """Wake a thread from a condition, so that it takes its pending interrupt.

    Python raises it between two bytecodes, which a wait without a timeout does not reach. A condition may wake
    spuriously, so its waiter checks again; the lock belongs to this waiter alone.
    """
    frame = frame_of(ident)
    if ident == threading.main_thread().ident or frame is None or frame.f_code is not threading.Condition.wait.__code__:
        return 0
    waiter = frame.f_locals.get("waiter")
    try:
        # Missing if the wait has just ended; then this raises.
        waiter.release()  # pyright: ignore[reportOptionalMemberAccess]
    except (AttributeError, RuntimeError):
        return 0
    return 1
