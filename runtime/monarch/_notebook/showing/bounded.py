"""Values cut for display: the first items of large containers, the beginning of long texts."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import islice
from typing import Any

from monarch._core.kinds import class_of, is_a, is_dict

ITEMS = 1000
"""Items of one list, tuple, set or mapping that are shown, as in IPython."""
ALL = 10_000
"""Items of a value that are shown, with those of what it contains."""
TEXT = 19_000
"""Characters of a text, or bytes, that are shown."""
_OPEN = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", dict: "{}"}


class _Shown:
    """Stands for something in the text of a value."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def bounded(value: object) -> object:
    """Return a small value itself; otherwise a copy of the shown part, with counts of the rest."""
    return _Cut().cut(value) if _count(value, ALL, set()) > ALL else value


def _count(value: Any, most: int, inside: set[int]) -> int:
    """Count the items of a value recursively; return more than ``most`` if not all can be shown.

    Args:
        value: the value.
        most: where counting ends.
        inside: identities of the containers that this one is in.
    """
    if _is_long(value) or _is_odd(value) or (_is_container(value) and len(value) > ITEMS):
        return most + 1
    if not _is_container(value) or id(value) in inside:
        return 1
    inside.add(id(value))
    count = 1
    for each in _items(value):
        count += _count(each, most - count, inside)
        if count > most:
            break
    inside.discard(id(value))
    return count


def _is_long(value: Any) -> bool:
    return isinstance(value, (str, bytes, bytearray)) and len(value) > TEXT


def _is_container(value: Any) -> bool:
    return type(value) in _OPEN


def _is_odd(value: Any) -> bool:
    """Return whether it is large and of a type whose items are not looked at, such as a deque or a Counter."""
    if isinstance(value, type) or not (isinstance(value, Sized) and type(value).__module__ == "collections"):
        return False
    return len(value) > ITEMS


def _items(value: Any) -> Iterable[Any]:
    if not is_dict(value) or type(value) is not dict:
        return value
    return (part for pair in value.items() for part in pair)


class _Cut:
    """Makes the copy; one for a value, since the number of items is bounded over all of it."""

    def __init__(self) -> None:
        self._left = ALL
        self._inside: set[int] = set()
        """Identities of the containers that are being copied."""

    def cut(self, value: Any) -> object:
        """Return a value, or a part of it."""
        if _is_long(value):
            unit = "characters" if isinstance(value, str) else "bytes"
            return _Shown(f"{value[:TEXT]!r} … {len(value) - TEXT} more {unit}")
        if _is_odd(value):
            return _beginning(value)
        if not _is_container(value):
            return value
        if id(value) in self._inside or (value and self._left <= 0):
            opening = _OPEN[type(value)]
            return _Shown(f"{opening[0]}… {len(value)} items{opening[1]}")
        self._inside.add(id(value))
        try:
            return self._copy(value)
        finally:
            self._inside.discard(id(value))

    def _copy(self, value: Any) -> object:
        count = min(len(value), ITEMS, self._left)
        self._left -= count
        more = [_Shown(f"… {len(value) - count} more items")] if count < len(value) else []
        if is_dict(value) and type(value) is dict:
            pairs = [(self.cut(key), self.cut(each)) for key, each in islice(value.items(), count)]
            return _mapping(pairs, more)
        parts = [*(self.cut(each) for each in islice(value, count)), *more]
        # Of a set the items may be unhashable by now, so its text is made here.
        kind = class_of(value)
        return _Shown(_braces(kind, parts)) if is_a(value, set, frozenset) else kind(parts)


def _mapping(pairs: list[tuple[object, object]], more: list[_Shown]) -> object:
    # The stand-in for a key may not be hashable.
    made: dict[object, object] = {key if _is_plain(key) else _Shown(repr(key)): each for key, each in pairs}
    made.update((each, _Shown("…")) for each in more)
    return made


def _is_plain(key: object) -> bool:
    return isinstance(key, (str, int, float, _Shown))


def _braces(kind: type, parts: list[Any]) -> str:
    text = "{" + ", ".join(map(repr, parts)) + "}"
    return text if kind is set else f"frozenset({text})"


def _beginning(value: Any) -> _Shown:
    """Return the beginning of a value's own repr, which is quicker than pretty-printing."""
    text = repr(value)
    return _Shown(text if len(text) <= TEXT else f"{text[:TEXT]} … {len(value)} items in all")
