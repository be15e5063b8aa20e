"""asyncio, imported at first use: most programs make calls without it, and its import is slow."""

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
    """Return whether an event loop runs in this thread. Never imports asyncio: where it was not imported, none runs."""
    find = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
    return find is not None and find() is not None
