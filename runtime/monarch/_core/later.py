"""asyncio, imported when it is first used: most programs make calls without it, and it takes long to import."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio as asyncio
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("asyncio"), name)

    asyncio = _Later()


def runs_event_loop() -> bool:
    """Whether an event loop runs in this thread. Imports nothing: where asyncio was never imported, none does."""
    find = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
    return find is not None and find() is not None
