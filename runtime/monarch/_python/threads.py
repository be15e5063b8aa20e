"""The registry that starts all threads of this package."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any
from weakref import WeakSet

_made: WeakSet[Thread] = WeakSet()
"""Its threads; added to by any thread, in single operations of the set."""


def new_thread(name: str, target: Callable[..., object], *args: Any) -> Thread:
    """Return a thread of this package, to be started by the caller; it does not keep the process alive.

    Args:
        name: what stacks and docs/threads.md call it, from ``monarch-`` on; an actor's has the name of the actor.
        target: called in it.
        args: arguments of the target.
    """
    thread = Thread(target=target, name=name, args=args, daemon=True)
    _made.add(thread)
    return thread


def spawn_thread(name: str, target: Callable[..., object], *args: Any) -> Thread:
    """Start a thread of this package, see ``new_thread``.

    Raises:
        RuntimeError: the system starts no more threads (``ulimit -u``, or no memory for a stack).
    """
    thread = new_thread(name, target, *args)
    thread.start()
    return thread


def is_own(thread: Thread) -> bool:
    """Return whether a thread is one of this package."""
    return thread in _made
