"""Services of a rank that begin and end watches of its variables, for ``%mesh watch``."""

from __future__ import annotations

from monarch._debug.sentry.rank import begin, finish
from monarch._node.services.registry import service
from monarch._notebook.looking.at_frame import look


@service("watching.watch_here", "probe")
def watch_here(key: str, source: str, level: int, every: int, count: int) -> tuple[bool, str]:
    """Service: watch the value of an expression; return whether it can be watched, and what it is or the error.

    Args:
        key: the key of the watch, the same on all ranks.
        source: the expression, which is its name too.
        level: the level of the frame in which it is evaluated; see ``scope_of``.
        every: steps between two comparisons.
        count: the number of ranks that are compared.
    """
    return look(level, lambda scope: begin(key, source, scope.value_of(source), every, count))


@service("watching.end_here", "probe")
def end_here(key: str) -> bool:
    """Service: end a watch; return whether there was one."""
    return finish(key)
