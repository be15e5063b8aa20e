"""asyncio, imported when it is first used: most programs make calls without it, and it takes long to import."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio as asyncio
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("asyncio"), name)

    asyncio = _Later()
