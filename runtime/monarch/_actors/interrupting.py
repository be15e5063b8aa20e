"""Interrupts of one call of one actor, at the request of another process."""

from __future__ import annotations

import signal
import threading

from monarch._actors.mailbox import Mailbox
from monarch._actors.table import actors_of
from monarch._core.later import asyncio
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._procs.rank.foreground import interrupt_programs

_LOOP = 0.1
"""Seconds for an event loop to reach a cancelled task; otherwise it is in code that does not await."""


@service("interrupts.interrupt", "quick")
def interrupt(key: str, src: str, port: int) -> bool:
    """Interrupt a call that an actor of this process handles.

    Args:
        key: of the actor's mesh.
        src: the calling proc.
        port: the port at which the caller waits.

    Returns:
        Whether the call was running or queued.
    """
    mailbox = actors_of(current_node()).here.get(key)
    if mailbox is None:
        return False
    # Do not wait for its output.
    actors_of(mailbox.node).interrupts += 1
    loop = mailbox.executor.loop
    if loop is not None:
        return _on_loop(mailbox, src, port)
    running = mailbox.running
    if running is None or running.port != port or running.src != src:
        return mailbox.drop(src, port)
    threads = mailbox.executor.interrupts
    if threads is not None:
        entered = threads.entered
        elsewhere = threads.ident != threading.get_ident()
        # The call may have ended, and the next one have begun.
        raised = mailbox.running is running and threads.interrupt(entered=entered)
        if raised and elsewhere:
            # This ends a wait in C, and then the thread takes the interrupt.
            interrupt_programs(threads.native)
        return raised
    mailbox.executor.meant = mailbox, running
    # Python's handler runs in the main thread; a call that sleeps there wakes only if the main thread gets the signal.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    return True


def _on_loop(mailbox: Mailbox, src: str, port: int) -> bool:
    loop = mailbox.executor.loop
    assert loop is not None
    found = {task for task, call in list(mailbox.turns.tasks.items()) if call.port == port and call.src == src}
    known = mailbox.turns.has(src, port)
    done = threading.Event()

    def cancel() -> None:
        mailbox.turns.cancel(src, port, "interrupted")
        done.set()

    loop.call_soon_threadsafe(cancel)

    def insist() -> None:
        if done.is_set() or asyncio.current_task(loop) not in found:
            return
        threads = mailbox.executor.interrupts
        if threads is not None:
            threads.interrupt(inside=True)
        else:
            mailbox.executor.unwanted = found
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    mailbox.node.receive_loop.call_later(_LOOP, insist)
    return known
