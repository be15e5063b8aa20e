"""Where values are that a step uses."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

ABSENT: Any = object()


class ValuePlace(NamedTuple):
    """Where a value is.

    Attributes:
        holder: a dict, list, tuple, deque, or an object with attributes, such as a cell, a class or a module.
        key: the key in a dict or sequence; an attribute otherwise.
        text: how the program would write it.
    """

    holder: Any
    key: Any
    text: str

    @property
    def kind(self) -> str:
        """How the value is reached: "dict", "sequence" or "attribute"."""
        if isinstance(self.holder, dict):
            return "dict"
        return "sequence" if isinstance(self.holder, list | tuple | deque) else "attribute"

    def get(self) -> Any:
        """Return the value now."""
        holder, kind = self.holder, self.kind
        if kind == "dict":
            return holder.get(self.key, ABSENT)
        if kind == "sequence":
            return holder[self.key] if self.key < len(holder) else ABSENT
        return getattr(holder, self.key, ABSENT)

    def set(self, value: Any) -> None:
        """Put another value there."""
        if self.kind == "attribute":
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value
