"""The thread that holds a lock, and deadlocks of threads.

An ``RLock`` names its owner. Of other locks, the holder is a thread that is in the block of a ``with`` statement of the
lock, or has come past its ``acquire``: the source of the frames tells.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from monarch._core.kinds import is_dict, is_list
from monarch._core.places import is_users
from monarch._core.position import Frame
from monarch._python.frames import frame_of, outward

_OWNER = re.compile(r"owner=(\d+)")
_DEPTH = 200
_LONGEST_CHAIN = 16
_MOST_LINES = 20_000
"""Lines of a file beyond which it is not parsed."""
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


class HeldLock(NamedTuple):
    """A lock in the hands of a thread."""

    ident: int
    name: str
    """Of the thread."""
    line: str
    """Where it has taken the lock, as in ``cell [3] line 8``; empty if unknown."""
    at: str
    """Where it is now, likewise."""


class LockWait(NamedTuple):
    """The holder of the lock that a thread waits for."""

    text: str
    """The holder in words; empty if it is unknown."""
    is_deadlock: bool
    """Whether the holder waits for the thread, directly or by others."""


def wait_for(lock: Any, waiter: int, awaited: Callable[[FrameType], Any]) -> LockWait:
    """Return who holds a lock.

    Args:
        lock: that a thread waits for.
        waiter: the thread.
        awaited: returns the lock that the innermost frame of a thread waits for, or None.
    """
    if type(lock).__module__ not in ("_thread", "threading"):
        return LockWait("", False)
    held = holder_of(lock, waiter, awaited)
    if held is None:
        return LockWait("", False)
    parts = [_text(held)]
    seen = {waiter, held.ident}
    for _ in range(_LONGEST_CHAIN):
        frame = frame_of(held.ident)
        following = awaited(frame) if frame is not None else None
        del frame
        further = holder_of(following, held.ident, awaited) if following is not None else None
        if further is None:
            break
        if further.ident == waiter:
            since = f", taken at {further.line}" if further.line else ""
            parts.append(f"which waits for a lock held by this thread{since}: a deadlock")
            return LockWait(", ".join(parts), True)
        if further.ident in seen:
            break
        parts.append(f"which waits for a lock {_text(further)}")
        seen.add(further.ident)
        held = further
    return LockWait(", ".join(parts), False)


def holder_of(lock: Any, waiter: int, awaited: Callable[[FrameType], Any]) -> HeldLock | None:
    """Return the thread that holds a lock, another one than its waiter; None if it is not known."""
    owner = _OWNER.search(repr(lock)) if type(lock).__module__ in ("_thread", "threading") else None
    idents = [int(owner[1])] if owner else [each.ident for each in threading.enumerate() if each.ident is not None]
    for ident in idents:
        frame = frame_of(ident)
        if ident in (0, waiter) or frame is None:
            continue
        # A thread that waits for this lock does not hold it, whatever its source says.
        line = "" if awaited(frame) is lock else next(_taken(frame, lock), "")
        if owner or line:
            name = next((each.name for each in threading.enumerate() if each.ident == ident), str(ident))
            return HeldLock(ident, name, line, line_of(frame))
    return None


def _text(held: HeldLock) -> str:
    at = f" at {held.at}" if held.at else ""
    since = f", taken at {held.line}" if held.line and held.line != held.at else ""
    return f"held by thread {held.name!r}{at}{since}"


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code."""
    for each in outward(frame, _DEPTH):
        if is_users(each):
            return _place(each, each.f_lineno)
    return ""


def _place(frame: FrameType, line: int) -> str:
    return str(Frame(frame.f_code.co_filename, line, "<module>", ""))


def _taken(frame: FrameType, lock: Any) -> Iterator[str]:
    """Yield the lines in which the frames of a thread have taken a lock and not released it."""
    for each in outward(frame, _DEPTH):
        if not is_users(each):
            continue
        nodes = list(_nodes_of(each))
        line = each.f_lineno
        for node in nodes:
            if isinstance(node, ast.With) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line):
                for item in node.items:
                    if _value(item.context_expr, each) is lock:
                        yield _place(each, item.context_expr.lineno)
        calls = [
            (node.lineno, node.func.attr)
            for node in nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("acquire", "release")
            and node.lineno < line
            and _value(node.func.value, each) is lock
        ]
        if calls and max(calls)[1] == "acquire":
            yield _place(each, max(calls)[0])


def _nodes_of(frame: FrameType) -> Iterator[ast.AST]:
    """Yield the nodes of the source of a frame, without those of functions inside it."""
    code = frame.f_code
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals)[:_MOST_LINES])
    found = _scope_of(source, code.co_name, code.co_firstlineno)
    left: list[ast.AST] = list(ast.iter_child_nodes(found)) if found is not None else []
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _Scope):
            left += ast.iter_child_nodes(node)


@functools.lru_cache(maxsize=64)
def _scope_of(source: str, name: str, line: int) -> ast.AST | None:
    """Return the function of a source, or the module; None if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == line:
                return node
    return None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, an attribute or a constant subscript; it reads what is stored and runs no code."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        stored = getattr(_value(node.value, frame), "__dict__", None)
        return stored.get(node.attr) if is_dict(stored) else None
    if isinstance(node, ast.Subscript):
        whole = _value(node.value, frame)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if is_dict(whole) and type(whole) is dict and isinstance(key, str | int):
            return whole.get(key)
        if is_list(whole) and isinstance(key, int) and -len(whole) <= key < len(whole):
            return whole[key]
    return None
