"""Notes about asyncio tasks that a cell leaves pending."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

_SHOWN = 3


class CellTasks:
    """The tasks that cells have told of."""

    def __init__(self) -> None:
        self._told: WeakSet[Any] = WeakSet()

    def tell(self, tasks: Iterable[Any], file: Any) -> None:
        """Say which of these tasks are new: a rank runs them only while a cell awaits."""
        new = [task for task in tasks if task not in self._told]
        self._told.update(new)
        if not new:
            return
        names = sorted(_name(task) for task in new)
        listed = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        what = "an asyncio task is pending" if len(new) == 1 else f"{len(new)} asyncio tasks are pending"
        print(f"note: {what} ({listed}); on a rank, tasks run only while a cell awaits", file=file)


def _name(task: Any) -> str:
    return getattr(task.get_coro(), "__qualname__", None) or task.get_name()
