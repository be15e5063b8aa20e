"""Services of a rank: evaluate an expression, and tell of its value what a comparison across ranks asks for."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from monarch._core.digests.comparison import ComparedPart
from monarch._core.digests.flat import Flat
from monarch._core.text.tables import value_text
from monarch._node.services.registry import service
from monarch._notebook.looking.at_frame import look, text_of
from monarch._notebook.looking.parts import mark_of, part_of, parts_of

_MOST = 4
"""Comparisons whose values are held, in case their end was not heard."""
_WIDTH = 160
_held: OrderedDict[str, dict[str, Any]] = OrderedDict()
"""The parts of values that are being compared, by comparison. Single operations, by the threads of these services."""
_found: dict[str, list[ComparedPart]] = {}
"""Their descriptions; written with ``_held``."""

Begun = tuple[bytes, int, int, str]
"""A hash of the value, its parts, those that cannot be read, and the value in a few words."""


@service("comparing.begin", "probe")
def begin(name: str, source: str, level: int) -> tuple[bool, Begun | str]:
    """Service: evaluate an expression, and return a hash of its value; or the error.

    Args:
        name: the name of the comparison; the value is held until ``end``.
        source: the expression.
        level: the level of the frame in which it is evaluated; see ``scope_of``.
    """
    ok, value = look(level, lambda scope: scope.value_of(source))
    if not ok:
        return False, str(value)
    try:
        values = parts_of(value)
        parts = [part_of(path, each) for path, each in values.items()]
    except Exception as error:
        # Any object may have code of its own that raises, and a container may change while it is read.
        return False, f"its value cannot be read: {text_of(error)}"
    _held[name], _found[name] = values, parts
    while len(_held) > _MOST:
        _found.pop(_held.popitem(last=False)[0], None)
    unread = sum(not part.mark for part in parts)
    return True, (mark_of(parts), len(parts), unread, _text(value, parts))


@service("comparing.parts_here", "probe")
def parts_here(name: str) -> list[tuple[str, str, bytes, str]]:
    """Service: return the parts of a value that is held."""
    return [(each.path, each.form, each.mark, each.text) for each in _found.get(name, [])]


@service("comparing.figures_here", "probe")
def figures_here(name: str, path: str) -> tuple[str, str, tuple[int, ...], int]:
    """Service: return an array in a few words, the kind of its elements, its shape, and their number."""
    value = _held[name][path]
    flat = Flat(value)
    return value_text(value, _WIDTH) + _norm(value), flat.kind, flat.shape, flat.count


@service("comparing.hashes_here", "probe")
def hashes_here(name: str, path: str, start: int, stop: int, step: int) -> list[bytes]:
    """Service: return hashes of elements of an array; see ``Flat.hashes``."""
    return Flat(_held[name][path]).hashes(start, stop, step)


@service("comparing.data_here", "probe")
def data_here(name: str, path: str, start: int, stop: int) -> bytes:
    """Service: return the bytes of elements of an array."""
    return Flat(_held[name][path]).data(start, stop)


@service("comparing.end", "quick")
def end(name: str) -> None:
    """Service: forget the value of a comparison."""
    _held.pop(name, None)
    _found.pop(name, None)


def _text(value: Any, parts: list[ComparedPart]) -> str:
    if len(parts) == 1 and not parts[0].path:
        return parts[0].text
    return f"{type(value).__name__} of {len(parts):,} parts"


def _norm(value: Any) -> str:
    """Return the norm of an array of floats as text; empty for other values."""
    try:
        if hasattr(value, "detach"):
            norm = float(value.detach().norm().item()) if value.is_floating_point() else None
        else:
            norm = float((value.astype("float64") ** 2).sum() ** 0.5) if value.dtype.kind == "f" else None
        return f", norm {norm:.6g}" if norm is not None else ""
    except Exception:
        # It is no array, or its library cannot do this for its layout.
        return ""
