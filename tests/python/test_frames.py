"""Frames of other threads: whether they run bytecode, and writing the local variables of a function that is called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from leaks import wait_until
from monarch._notebook.looking.writing import declared_global, write_locals
from monarch._python.frames import frame_of, is_between_calls


def changed_by(change: Callable[[], None], value: int) -> tuple[object, ...]:
    """Return variables of this function after a change: plain, shared with an inner function, and deleted."""
    plain, shared, gone = value, value, value

    def inner() -> int:
        return shared

    change()
    return plain, shared, inner(), "gone" in locals() and gone


def test_variables_of_a_caller_are_written() -> None:
    def change() -> None:
        frame = sys._getframe(1)
        write_locals(frame, {"plain": "new", "shared": 2, "unknown": 3}, {"gone"})
        assert frame.f_locals["unknown"] == 3

    assert changed_by(change, 1) == ("new", 2, 2, sys.version_info >= (3, 13) and 1)


def test_variables_are_written_while_others_look_at_the_frame() -> None:
    ended = threading.Event()
    frame = sys._getframe()
    count = 0

    def look() -> None:
        while not ended.is_set():
            assert "ended" in frame.f_locals

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(2000):
            write_locals(frame, {"count": number}, set())
            assert count == number
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("source", "names"),
    [("x = 1", set()), ("global x, y\nx = 1", {"x", "y"}), ("def f():\n global z", {"z"}), ("(", set())],
)
def test_global_names_are_those_declared(source: str, names: set[str]) -> None:
    assert declared_global(source) == names


def test_spinning_frame_is_between_calls_unlike_a_waiting_one() -> None:
    spins, released = threading.Event(), threading.Event()
    ended: list[bool] = []

    def spin() -> None:
        spins.set()
        while not ended:
            pass

    def wait() -> None:
        released.wait()

    spinning, waiting = threading.Thread(target=spin), threading.Thread(target=wait)
    spinning.start()
    waiting.start()
    try:
        spins.wait()
        assert wait_until(lambda: in_function(spinning, spin) and seen_between_calls(spinning))
        assert wait_until(lambda: not in_function(waiting, wait))
        assert not seen_between_calls(waiting)
    finally:
        ended.append(True)
        released.set()
        spinning.join()
        waiting.join()


def in_function(thread: threading.Thread, function: Callable[[], None]) -> bool:
    """Return whether a function is the innermost frame of a thread."""
    frame = frame_of(thread.ident or 0)
    return frame is not None and frame.f_code is function.__code__


def seen_between_calls(thread: threading.Thread) -> bool:
    """Return whether a thread runs bytecode."""
    frame = frame_of(thread.ident or 0)
    return frame is not None and is_between_calls(frame)
