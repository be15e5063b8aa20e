"""Interrupting one call of one actor, wherever its code runs: in the main thread, in a thread, or on an event loop."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import TYPE_CHECKING

from monarch._actors.table import actors_of
from monarch._core.later import asyncio
from monarch._node.service import service
from monarch._procs.rank.foreground import interrupt_programs
from monarch._wire.held import harmless

if TYPE_CHECKING:
    from monarch._actors.mailbox import Cell
    from monarch._wire.messages import Call

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]
_LOOP = 0.1
"""Seconds for an event loop to come to a cancelled task; a loop that does not is in code that awaits nothing."""
_arrived: set[int] = set()
"""Threads to which the last interrupt has come."""
NOTICE = signal.SIGRTMIN + 7
"""A signal that does nothing but have Python's own handler run, which it does between two steps of Python code."""
noticed = 0
"""How often it has run."""


def listen() -> None:
    """Takes that signal; called from the main thread."""
    harmless.append(_notice)
    signal.signal(NOTICE, _notice)


def _notice(*_: object) -> None:
    notice()


def notice() -> None:
    """A handler of signals runs in the main thread, so Python code goes on there.

    That of SIGINT counts as well: where it raises, Python may leave the other signal pending until the next one.
    """
    global noticed
    noticed += 1


def prod() -> None:
    """Has the main thread show whether its Python code goes on, by ``noticed``."""
    signal.pthread_kill(threading.main_thread().ident or 0, NOTICE)


class Interrupt(KeyboardInterrupt):
    """A KeyboardInterrupt in a thread that is not the main one."""

    def __init__(self) -> None:
        super().__init__()
        # Python makes it in that thread, when it raises it there.
        _arrived.add(threading.get_ident())


# It is what an endpoint expects, and what is shown.
Interrupt.__name__ = Interrupt.__qualname__ = "KeyboardInterrupt"


class ThreadInterrupts:
    """Raises KeyboardInterrupt in a thread while it runs code of the user, and at no other time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.ident = 0
        """The thread, once it has run something."""
        self.native = 0
        """Its native id; written as ``ident`` is."""
        self._inside = False
        self._raised = False
        self.entered = 0
        """How often code of the user has begun here; written by this thread."""

    def enter(self) -> None:
        """Code of the user begins in this thread."""
        if not self.native:
            self.native = threading.get_native_id()
        self.ident = threading.get_ident()
        self.entered += 1
        self._inside = True

    def leave(self) -> None:
        """It has ended: what was raised and has not come is taken back."""
        with self._lock:
            self._inside = False
            if self._raised:
                self._raised = False
                _raise_in(self.ident, ctypes.py_object())

    @property
    def pending(self) -> bool:
        """Whether an interrupt was raised and has not come yet."""
        return self._raised and self.ident not in _arrived

    def interrupt(self, inside: bool = False, entered: int | None = None) -> bool:
        """Raises it, from another thread; whether there was code to interrupt, as ``inside`` may say it.

        With ``entered``, only what had begun by then is interrupted.
        """
        with self._lock:
            if not (inside or self._inside) or entered not in (None, self.entered):
                return False
            if not self.pending:
                _arrived.discard(self.ident)
                self._raised = True
                _raise_in(self.ident, Interrupt)
            return True


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
    from monarch._node.current import current_node

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
    print(text, file=sys.stderr, flush=True)


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


def force(cell: Cell) -> None:
    """Interrupt whatever code of the user runs in an actor's thread, from another one."""
    executor = cell.executor
    loop, threads, inside = executor.loop, executor.interrupts, executor.interruptible
    task = asyncio.current_task(loop) if loop is not None else None
    if task is not None:
        executor.unwanted = {task}
        inside = True
    if inside and threads is not None:
        threads.interrupt(inside=True)
    elif inside:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
