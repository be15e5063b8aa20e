"""Interrupts of one call of one actor, at the request of another process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence

from monarch._actors.mailbox import Mailbox
from monarch._actors.pausing.gate import gate
from monarch._actors.table import actors_of
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._procs.rank.foreground import end_shell, interrupt_programs

_SHELL = 0.1
"""Seconds for the main thread to take an interrupt; otherwise it may be in code that ignores the signal."""
_LOOP = 0.1
"""Seconds for an event loop to reach a cancelled task; otherwise it is in code that does not await."""


@service("interrupts.interrupt", "quick")
def interrupt(key: str, src: str, port: int) -> bool:
    """Interrupt a call that an actor of this process handles.

    Args:
        key: the key of the actor's mesh.
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
        # The code that handles the interrupt is not to be paused.
        gate.resume()
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

    def insist() -> None:
        if mailbox.running is running:
            end_shell()

    mailbox.node.receive_loop.call_later(_SHELL, insist)
    return True


@service("interrupts.drop", "quick")
def drop(key: str, src: str, port: int) -> None:
    """Answer a queued call of an actor of this process instead of handling it; one that has begun continues.

    Args:
        key: the key of the actor's mesh.
        src: the calling proc.
        port: the port at which the caller would wait.
    """
    mailbox = actors_of(current_node()).here.get(key)
    if mailbox is None:
        return
    loop = mailbox.executor.loop
    if loop is None:
        mailbox.drop(src, port)
    else:
        loop.call_soon_threadsafe(mailbox.turns.cancel_queued, src, port, "cancelled")


def _on_loop(mailbox: Mailbox, src: str, port: int) -> bool:
    loop = mailbox.executor.loop
    assert loop is not None
    tasks = {task for task, call in list(mailbox.turns.tasks.items()) if call.port == port and call.src == src}
    known = mailbox.turns.has(src, port)
    done = threading.Event()

    def cancel() -> None:
        mailbox.turns.cancel(src, port, "interrupted")
        done.set()

    loop.call_soon_threadsafe(cancel)

    def insist() -> None:
        task = mailbox.executor.running_task()
        if task in tasks and not done.is_set():
            mailbox.executor.interrupt(task)

    mailbox.node.receive_loop.call_later(_LOOP, insist)
    return known


def abort_paused(mailboxes: Sequence[Mailbox], reason: str) -> None:
    """End the calls of a paused process, which ends: none of them continues, and queued ones do not begin.

    Args:
        mailboxes: the mailboxes of the process.
        reason: for the callers of queued messages.
    """
    for mailbox in mailboxes:
        mailbox.refuse_rest(reason)
    running = [each for each in mailboxes if not gate.holds(_thread_of(each))]
    gate.end()
    # Those in C code, which were to pause when it returns.
    for mailbox in running:
        mailbox.executor.interrupt_now()


def _thread_of(mailbox: Mailbox) -> int:
    """Return the id of the thread of an actor."""
    threads = mailbox.executor.interrupts
    return threads.ident if threads is not None else threading.main_thread().ident or 0
