"""The wait of a task of an event loop: its innermost ``await``, followed through tasks and ``asyncio.gather``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import FrameType
from typing import Any

from monarch._core.kinds import is_a
from monarch._core.places import is_users

_DEPTH = 60


def awaiting(task: asyncio.Task[Any]) -> tuple[list[FrameType], str]:
    """Return the frames of the user's code that a task is in, innermost first, and the function that it awaits."""
    chain: list[tuple[FrameType, str]] = []
    seen: set[int] = set()
    following: Any = task
    while is_a(following, asyncio.Task) and id(following) not in seen and len(seen) < _DEPTH:
        seen.add(id(following))
        chain += _chain(following.get_coro())
        following = _waits_for(following)
    frames = [frame for frame, _ in reversed(chain) if is_users(frame)]
    name = chain[-1][1] if chain and not is_users(chain[-1][0]) else ""
    return frames, name


def task_of(frame: FrameType | None) -> asyncio.Task[Any] | None:
    """Return the task that a thread runs an event loop for, if the loop waits in its selector; else None."""
    waits = False
    for _ in range(_DEPTH):
        if frame is None:
            return None
        code = frame.f_code
        waits = waits or (code.co_name == "select" and code.co_filename.endswith("selectors.py"))
        if code.co_name == "run_until_complete" and code.co_filename.endswith("base_events.py"):
            found: Any = frame.f_locals.get("future")
            return found if waits and is_a(found, asyncio.Task) and not found.done() else None
        if is_users(frame):
            return None
        frame = frame.f_back
    return None


def _waits_for(task: Any) -> Any:
    """Return the task that a task waits for; of several, the first that is not done; None if it is no task."""
    waiter = getattr(task, "_fut_waiter", None)
    children = getattr(waiter, "_children", None)
    if children is not None:
        return next((each for each in children if not each.done()), None)
    return waiter


def _chain(coroutine: Any) -> Iterator[tuple[FrameType, str]]:
    """Yield the frames of a coroutine and of those that it awaits, outermost first, with their names."""
    for _ in range(_DEPTH):
        frame: Any = next(
            (found for name in ("cr_frame", "gi_frame", "ag_frame") if (found := getattr(coroutine, name, None))), None
        )
        if frame is None:
            return
        yield frame, str(getattr(coroutine, "__qualname__", ""))
        coroutine = next(
            (
                found
                for name in ("cr_await", "gi_yieldfrom", "ag_await")
                if (found := getattr(coroutine, name, None)) is not None
            ),
            None,
        )
