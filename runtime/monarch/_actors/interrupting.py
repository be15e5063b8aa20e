"""Interrupting one call of one actor, by request of another process."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from monarch._actors.mailbox import Cell
from monarch._actors.table import actors_of
from monarch._core.later import asyncio
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._procs.rank.foreground import interrupt_programs
from monarch._wire.receiving.aside import tell

if TYPE_CHECKING:
    from monarch._wire.messages import Call

_LOOP = 0.1
"""Seconds for an event loop to come to a cancelled task; a loop that does not is in code that awaits nothing."""


@service("quick")
def interrupt(key: str, src: str, port: int, front: bool = False) -> bool:
    """Interrupts a call that an actor of this process handles.

    Args:
        key: of the actor's mesh.
        src: proc that has called.
        port: where its caller waits for the answer.
        front: whether the call that it waits behind is interrupted as well, if that has the same caller.

    Returns:
        Whether the call was being handled, or waited for its turn.
    """
    cell = actors_of(current_node()).here.get(key)
    if cell is None:
        return False
    # Its output is not waited for.
    actors_of(cell.node).interrupts += 1
    loop = cell.executor.loop
    if loop is not None:
        return _on_loop(cell, src, port, front)
    running = cell.running
    if running is None or running.port != port or running.src != src:
        queued = cell.drop(src, port)
        if not front or not queued or running is None or running.src != src:
            return queued
        _tell_of_front(cell, running)
    threads = cell.executor.interrupts
    if threads is not None:
        entered = threads.entered
        elsewhere = threads.ident != threading.get_ident()
        # The call may have ended, and the next one have begun.
        raised = cell.running is running and threads.interrupt(entered=entered)
        if raised and elsewhere:
            # What the thread waits for in C ends by this, and then it takes the interrupt.
            interrupt_programs(threads.native)
        return raised
    cell.executor.meant = cell, running
    # Python's handler runs in the main thread whichever gets it; a call that sleeps there wakes up only if that does.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    return True


def _tell_of_front(cell: Cell, front: Call) -> None:
    """On the stderr of the rank, which its caller sees."""
    text = f"monarch: {cell.title()}.{front.method}() is interrupted: the call that was stopped waits behind it"
    tell(text)


def _on_loop(cell: Cell, src: str, port: int, also_front: bool) -> bool:
    loop = cell.executor.loop
    assert loop is not None
    found = {task for task, call in list(cell.turns.tasks.items()) if call.port == port and call.src == src}
    known = cell.turns.has(src, port)
    done = threading.Event()

    def cancel() -> None:
        front = cell.turns.call
        waits = any(call.port == port and call.src == src for call, _ in cell.turns.waiting)
        if also_front and waits and front is not None and front.src == src:
            _tell_of_front(cell, front)
            cell.turns.cancel(src, front.port, "interrupted")
        cell.turns.cancel(src, port, "interrupted")
        done.set()

    front, task = cell.turns.call, cell.turns.task
    if also_front and known and not found and task is not None and front is not None and front.src == src:
        # A loop that does not come to a cancelled task is kept by this one.
        found.add(task)
    loop.call_soon_threadsafe(cancel)

    def insist() -> None:
        if done.is_set() or asyncio.current_task(loop) not in found:
            return
        threads = cell.executor.interrupts
        if threads is not None:
            threads.interrupt(inside=True)
        else:
            cell.executor.unwanted = found
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    cell.node.pump.call_later(_LOOP, insist)
    return known
