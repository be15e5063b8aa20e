"""The end of a rank's process as Python ends one: threads, then exit functions. Ranks end by ``os._exit``."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from monarch._python.frames import caller

_atexit: Any = atexit
_finalize: Any = weakref.finalize
_threading: Any = threading
_WAITING = "multiprocessing.util"
_first: int | None = None
"""The number of the first finalizer that this process has made; None in a zygote. Written once."""


def begin() -> None:
    """Note that this fork begins as a rank: finalizers of the zygote's objects are not for its end."""
    global _first
    _first = next(_finalize._index_iter)


def join_threads() -> None:
    """Wait for the non-daemon threads, after those of thread pools were told to end; in the main thread."""
    _threading._shutdown()


def left_threads() -> list[str]:
    """Return the names of the threads that Python would wait for."""
    main = threading.main_thread()
    return [each.name for each in threading.enumerate() if each is not main and not each.daemon]


def left_children() -> list[str]:
    """Return the names of the processes of ``multiprocessing`` that Python would wait for."""
    module = sys.modules.get("multiprocessing")
    return [each.name for each in module.active_children() if not each.daemon] if module is not None else []


def run_functions() -> None:
    """Run the functions of ``atexit``, finalizers among them, the last one first; errors are printed."""
    if _first is not None:
        for info in list(_finalize._registry.values()):
            if info.index < _first:
                info.atexit = False
    show = sys.unraisablehook

    def unless_waiting(unraisable: sys.UnraisableHookArgs, /) -> None:
        # An interrupted wait for child processes, which the caller tells.
        function = unraisable.object
        if unraisable.exc_type is not KeyboardInterrupt or getattr(function, "__module__", "") != _WAITING:
            show(unraisable)

    sys.unraisablehook = unless_waiting
    try:
        _atexit._run_exitfuncs()
    finally:
        sys.unraisablehook = show


@contextmanager
def at_end_of_program() -> Generator[None]:
    """Run the functions that the program in this block registers itself with ``atexit`` at its end, not the rank's."""
    register, unregister = atexit.register, atexit.unregister
    functions: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def add(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if caller().f_globals.get("__name__") != "__main__":
            # A library's, which later programs of this process use too.
            return register(function, *args, **kwargs)
        functions.append((function, args, kwargs))
        return function

    def drop(function: Callable[..., Any], /) -> None:
        functions[:] = [each for each in functions if each[0] != function]
        unregister(function)

    # Their types are those of the functions themselves.
    atexit.register, atexit.unregister = add, drop  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        try:
            while functions:
                function, args, kwargs = functions.pop()
                try:
                    function(*args, **kwargs)
                except Exception:
                    traceback.print_exc()
        finally:
            atexit.register, atexit.unregister = register, unregister
