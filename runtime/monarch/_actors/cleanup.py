"""The state of an interrupted call: it cleans up, or has swallowed the interrupt and is back where that came."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from monarch._actors import interrupts
from monarch._python.frames import frame_of, handled_by

_CHAIN = 20
"""The most exceptions that are followed."""
_HARMLESS = {"Exception", "RuntimeError", "ValueError", "TypeError", "KeyError", "OSError", "StopIteration"}
"""Classes that a handler may name without catching an interrupt."""


class CleanupRegion(NamedTuple):
    """A block of code that has caught an interrupt; lines of its file, both ends included."""

    code: CodeType
    body: tuple[int, int]
    handlers: tuple[tuple[int, int], ...] = ()
    """Its ``except`` clauses; empty if unknown."""


def is_handling(ident: int) -> bool:
    """Return whether a thread runs ``except`` or ``finally`` code for an interrupt."""
    return of_interrupt(handled_by(ident))


def of_interrupt(error: BaseException | None) -> bool:
    """Return whether an exception is an interrupt, or was raised while one was handled."""
    for _ in range(_CHAIN):
        if error is None or isinstance(error, KeyboardInterrupt):
            break
        error = error.__context__
    return error is not None and isinstance(error, KeyboardInterrupt)


def cleans_up(ident: int) -> bool:
    """Return whether a thread has taken its interrupt, and has not gone back to the code that it interrupted."""
    raised = interrupts.raised.get(ident)
    if is_handling(ident):
        return True
    region = region_of(raised)
    return region is not None and not is_in(frame_of(ident), region)


def region_of(raised: BaseException | None) -> CleanupRegion | None:
    """Return the block that has caught an interrupt; None if none has yet."""
    tb = raised.__traceback__ if raised is not None else None
    if tb is None:
        return None
    code = tb.tb_frame.f_code
    lines = tuple(linecache.getlines(code.co_filename))
    enclosing = [each for each in _blocks(lines) if each[0][0] <= tb.tb_lineno <= each[0][1]]
    # The innermost one begins last.
    body, handlers = max(enclosing) if enclosing else ((0, sys.maxsize), ())
    return CleanupRegion(code, body, handlers)


def is_in(frame: FrameType | None, region: CleanupRegion) -> bool:
    """Return whether code runs in the body of a block, or is called from there."""
    while frame is not None:
        if frame.f_code is region.code and region.body[0] <= (frame.f_lineno or 0) <= region.body[1]:
            return True
        frame = frame.f_back
    return False


@lru_cache(8)
def _blocks(lines: tuple[str, ...]) -> list[tuple[tuple[int, int], tuple[tuple[int, int], ...]]]:
    """Return the bodies that catch interrupts in some source, with their handlers."""
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return []
    return list(_catching(tree))


def _catching(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[tuple[int, int], ...]]]:
    for node in ast.walk(tree):
        handlers = [each for each in getattr(node, "handlers", ()) if _catches(each)]
        if handlers:
            body: list[ast.stmt] = getattr(node, "body", [])
            yield _lines(body), tuple(_lines([each]) for each in handlers)
        elif isinstance(node, (ast.With, ast.AsyncWith)) and "suppress" in ast.dump(node.items[0]):
            yield _lines(node.body), ()


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(handler.type)} - {""}
    return bool(names - _HARMLESS)


def _lines(nodes: list[Any]) -> tuple[int, int]:
    return nodes[0].lineno, nodes[-1].end_lineno
