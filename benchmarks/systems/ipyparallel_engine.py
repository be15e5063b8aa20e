"""The code that runs in an engine."""

from __future__ import annotations

from typing import Any

from systems.base import Worker

_WORKER = Worker()


def invoke(method: str, *args: Any) -> Any:
    return getattr(_WORKER, method)(*args)
