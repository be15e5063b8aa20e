"""Objects of a kind in this process, and those inside of values."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_OF_THE_PROCESS = (types.ModuleType, type, types.FrameType)
"""Types of objects that refer to much of the process."""
_MOST = 500_000
"""Objects that a search looks at, which takes a second."""


class Search:
    """A search for the objects inside of values, from the outside inwards.

    Args:
        without: a class whose objects are left out, with what only they have.
        seen: the ids of objects that are left out, with what only they have; those that are looked at are added.
    """

    def __init__(self, without: type | None = None, seen: set[int] | None = None) -> None:
        self._kinds = _OF_THE_PROCESS if without is None else (*_OF_THE_PROCESS, without)
        self.seen = set[int]() if seen is None else seen
        self._most = _MOST + len(self.seen)
        self.is_whole = True
        """Whether all objects were looked at, so far."""

    def objects_in(self, values: Iterable[object]) -> Iterator[Any]:
        """Yield the values, and the objects inside, each once; of very many, the first."""
        left: deque[Any] = deque(values)
        while left:
            value = left.popleft()
            if id(value) in self.seen or not gc.is_tracked(value) or issubclass(type(value), self._kinds):
                continue
            if len(self.seen) >= self._most:
                self.is_whole = False
                return
            self.seen.add(id(value))
            yield value
            if issubclass(type(value), types.FunctionType):
                # Not its globals.
                left += [value.__closure__, value.__defaults__, value.__kwdefaults__]
            else:
                left += gc.get_referents(value)


def instances_of(kind: type, has_all: Callable[[Any], bool] = lambda _: True) -> list[Any]:
    """Return the objects of a class and those that inherit from it, but for those that ``gc.freeze`` has hidden.

    Args:
        kind: the class, of objects that the garbage collector tracks.
        has_all: returns whether the constructor of one has ended.
    """
    kinds = {*with_subclasses(kind)}
    # Each object refers to its class. Not gc.get_objects: a reference to each object of the process would unshare the
    # memory of all with the zygote. Not isinstance: objects tell their class.
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds and has_all(each)]


def with_subclasses(kind: type) -> Iterator[type]:
    """Yield a class and all classes that inherit from it."""
    yield kind
    for each in type.__subclasses__(kind):
        yield from with_subclasses(each)
